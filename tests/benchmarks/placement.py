"""What placement keeps of the prefix cache, and how evenly it spreads: each request runs on its partition's engine.

python tests/benchmarks/placement.py [--trace mooncake_conversation.jsonl] [--requests 6000]

Without a trace, conversations are made up: 400 of them, one system prompt of 700 tokens, turns of 40 to 400.
"""

import argparse
import json
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagestream_streams.gateway.placing import PrefixLengths
from pagestream_streams.protocol import placement

BLOCK = 512  # tokens of a block of the trace
CACHE_TOKENS = 600_000  # of each engine
FIRST_TOKENS = 64


def traced(path: Path, count: int) -> Iterator[list[int]]:
    """Return prompts in blocks of equal tokens, one for each hash of the trace; 64 stand for a block's 512."""
    with path.open() as lines:
        for _, line in zip(range(count), lines, strict=False):
            row = json.loads(line)
            yield [token for each in row["hash_ids"] for token in [each] * BLOCK]


def made_up(count: int) -> Iterator[list[int]]:
    chance = random.Random(3)
    system = [1] * 700
    talks: list[list[int]] = [[] for _ in range(400)]
    for _ in range(count):
        place = chance.randrange(len(talks))
        if not talks[place] or len(talks[place]) > 8000:
            talks[place] = list(system)
        talks[place] += [chance.randrange(2, 30_000) for _ in range(chance.randint(40, 400))]
        yield list(talks[place])


class Cache:
    """The blocks of 64 tokens that an engine holds, least recently used out first."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def run(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt were held."""
        held, chained, is_hit = 0, 0, True
        for start in range(0, len(prompt) - FIRST_TOKENS + 1, FIRST_TOKENS):
            chained = hash((chained, *prompt[start : start + FIRST_TOKENS]))
            is_hit = is_hit and chained in self.blocks
            held += FIRST_TOKENS * is_hit
            self.blocks[chained] = None
            self.blocks.move_to_end(chained)
        while len(self.blocks) > CACHE_TOKENS // FIRST_TOKENS:
            self.blocks.popitem(last=False)
        return held


def measure(prompts: Sequence[Sequence[int]], partitions: int, engines: int, how: str) -> str:
    names = [f"engine-{number}" for number in range(engines)]
    owners = [placement.owner(number, names) or "" for number in range(partitions)]
    caches = {name: Cache() for name in names}
    tokens: Counter[str] = Counter()
    requests: Counter[int] = Counter()
    hits, lengths, chance = 0, PrefixLengths(FIRST_TOKENS), random.Random(5)
    for prompt in prompts:
        if how == "random":
            at = chance.randrange(partitions)
        else:
            first = lengths.of(prompt, partitions) if how == "adaptive" else FIRST_TOKENS
            at, _ = placement.choices(prompt, partitions, first)
        held = caches[owners[at]].run(prompt)
        hits += held
        tokens[owners[at]] += len(prompt) - held
        requests[at] += 1
    share = hits / sum(map(len, prompts))
    used = sum(tokens.values()) / engines
    even = len(prompts) / partitions
    return (
        f"{share:6.1%} of prompt tokens cached, largest engine {max(tokens.values()) / used:.2f} x mean computed, "
        f"largest partition {max(requests.values()) / even:.1f} x mean, {len(requests)} partitions used"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--requests", type=int, default=6000)
    arguments = parser.parse_args()
    loads = {"made up": list(made_up(arguments.requests))}
    if arguments.trace:
        loads[arguments.trace.stem] = list(traced(arguments.trace, arguments.requests))
    for name, prompts in loads.items():
        for partitions, engines in ((4, 4), (32, 8), (256, 16)):
            for how in ("first 64", "adaptive", "random"):
                print(f"{name}, {partitions} partitions, {engines} engines, {how}: ", end="")
                print(measure(prompts, partitions, engines, how), flush=True)


if __name__ == "__main__":
    main()
