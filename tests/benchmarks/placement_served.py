"""Hit rate and load of real engines on hot prefixes, over HTTP: `pagestream serve --engines 2`, with the demo model.

    pagestream serve --engines 2 --dtype float32 --metrics-port 9400
    python tests/benchmarks/placement_served.py --engines 9401 9402 [--rate 4] [--requests 400]

Requests of one of 12 prompts of 640 tokens, by Zipf's law, each with up to 64 tokens of its own and 24 to generate,
arrive at random. The hit rate is that of the engines' counters, beside that of one cache without an end; loads are
tokens computed of prompts, and generated, by engine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from collections.abc import Sequence
from itertools import accumulate

import httpx

HEADS, HEAD_TOKENS, MOST_TOKENS, OUTPUT_TOKENS = 12, 640, 64, 24
BLOCK = 16  # tokens of a block of the engines' caches, on a CPU


def prompts(count: int, seed: int) -> list[tuple[int, list[int]]]:
    """Return prompts as token ids, each with the number of its head."""
    chance = random.Random(seed)
    heads = [[chance.randrange(10, 1000) for _ in range(HEAD_TOKENS)] for _ in range(HEADS)]
    popularity = list(accumulate(1 / rank for rank in range(1, HEADS + 1)))
    chosen = chance.choices(range(HEADS), cum_weights=popularity, k=count)
    return [
        (head, heads[head] + [chance.randrange(10, 1000) for _ in range(chance.randint(1, MOST_TOKENS))])
        for head in chosen
    ]


async def counters(http: httpx.AsyncClient, port: int) -> dict[str, float]:
    """Return an engine's counters by name."""
    text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^pagestream_(\w+)_total\{[^}]*\} (\S+)$", text, re.M)}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--engines", type=int, nargs="+", required=True, help="their metrics ports")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1, help="another one for another run: engines keep their caches")
    options = parser.parse_args()
    asked, chance = prompts(options.requests, options.seed), random.Random(options.seed)
    async with httpx.AsyncClient(timeout=300) as http:
        before = [await counters(http, port) for port in options.engines]

        async def ask(prompt: Sequence[int]) -> None:
            body = {"prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
            (await http.post(f"{options.url}/v1/completions", json=body)).raise_for_status()

        async with asyncio.TaskGroup() as tasks:
            for _, prompt in asked:
                tasks.create_task(ask(prompt))
                await asyncio.sleep(chance.expovariate(options.rate))
        after = [await counters(http, port) for port in options.engines]
    grown = [
        {name: late[name] - early.get(name, 0) for name in late} for late, early in zip(after, before, strict=True)
    ]
    hits, queries = (sum(each[f"prefix_cache_{name}"] for each in grown) for name in ("hits", "queries"))
    again = len(asked) - len({head for head, _ in asked})
    best = again * (HEAD_TOKENS // BLOCK * BLOCK) / sum(len(prompt) for _, prompt in asked)
    print(f"hit rate {hits / queries:.1%}, of one cache without an end {best:.1%}: {hits / queries / best:.0%} of it")
    for name, load in (
        ("prompt tokens", [each["tokens_prompt"] for each in grown]),
        ("computed prompt tokens", [each["prefix_cache_queries"] - each["prefix_cache_hits"] for each in grown]),
        ("generated tokens", [each["tokens_generated"] for each in grown]),
    ):
        print(f"{name}: {', '.join(f'{each:.0f}' for each in load)}: {max(load) / max(1, min(load)):.2f} : 1")


if __name__ == "__main__":
    asyncio.run(main())
