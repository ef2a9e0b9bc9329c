"""A storm of 50 tenants at three times what the engine can do, one of them hostile: does each other one get its share?

    PYTHONPATH=tests python tests/campaigns/tenant_storm.py [--policy fair] [--limits] [--seconds 150] [--json FILE]

Redis, two gateways and an engine are real processes; the model's step takes a fixed time (`paced_worker`), so that the
engine's limit is known. Each ordinary tenant sends requests of one size, at random times, at 2.5 times its share. The
hostile one sends ten times as many: prompts sixteen times as long, eight choices, half of them left after 0.3 s, and
each refusal is answered by another try at once.

Printed are the tokens (of prompts and outputs) of requests that ended within the measured time, as the deployment has
counted them (`pagestream usage`): of each tenant, as a part of an equal share of all. The exit status is 1 where one of
the ordinary tenants is further than 10 % from its share; where the hostile one has used less than its own, the rest is
shared by the others.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles

import httpx
from pagestream_streams import Broker
from pagestream_streams.limits import read_usage
from support.engines.paced_worker import PACE
from support.processes.stack import DEMO_MODEL, Stack

TENANTS, HOSTILE = 50, "hostile"
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 32
RUNNING, STEP_S = 16, 0.03
OVERLOAD, HOSTILE_RATE = 3.0, 10.0
HOSTILE_PROMPT, HOSTILE_CHOICES, HOSTILE_IN_FLIGHT = 16 * PROMPT_TOKENS, 8, 64
LEAVES_AFTER_S = 0.3
QUEUED = 128  # requests that a partition's class may hold
WARM_UP_S = 25.0
ANSWER_LIMIT_S = 120.0
MOST_OFF = 0.10
GIVEN = "default: {{}}\ntenants:\n  hostile: {{concurrent_requests: {running}, tokens_per_minute: {tokens}}}\n"


@dataclass
class Seen:
    """What clients saw."""

    outcomes: Counter[tuple[str, int]] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    """Of the ordinary tenants' answers."""


async def ordinary(client: httpx.AsyncClient, tenant: str, rate: float, seen: Seen, rng: random.Random) -> None:
    """Send requests at random times until cancelled."""
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(rng.expovariate(rate))
            group.create_task(ask(client, tenant, body(rng, PROMPT_TOKENS, 1), seen))


async def hostile(client: httpx.AsyncClient, rate: float, seen: Seen, rng: random.Random) -> None:
    """Send large requests, leave half of them, and try again at once what is refused."""
    room = asyncio.Semaphore(HOSTILE_IN_FLIGHT)

    async def attack() -> None:
        async with room:
            made = body(rng, HOSTILE_PROMPT, HOSTILE_CHOICES)
            for _ in range(3):
                leaves = rng.random() < 0.5
                try:
                    async with asyncio.timeout(LEAVES_AFTER_S if leaves else ANSWER_LIMIT_S):
                        if await ask(client, HOSTILE, made, seen) != httpx.codes.TOO_MANY_REQUESTS:
                            return
                except TimeoutError:
                    return

    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(rng.expovariate(rate))
            if not room.locked():
                group.create_task(attack())


def body(rng: random.Random, prompt_tokens: int, choices: int) -> dict[str, object]:
    prompt = [rng.randrange(10, 250) for _ in range(prompt_tokens)]
    return {"model": "demo", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "n": choices}


async def ask(client: httpx.AsyncClient, tenant: str, asked: dict[str, object], seen: Seen) -> int:
    began = time.monotonic()
    try:
        answer = await client.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {tenant}"})
    except httpx.HTTPError:
        seen.outcomes[tenant, 0] += 1
        return 0
    seen.outcomes[tenant, answer.status_code] += 1
    if tenant != HOSTILE and answer.status_code == httpx.codes.OK:
        seen.waits_s.append(time.monotonic() - began)
    return answer.status_code


async def used(broker: Broker) -> Counter[str]:
    """Tokens of all ended requests by tenant."""
    found: Counter[str] = Counter()
    for row in await read_usage(broker, since_s=4 * 3600):
        found[row.tenant] += row.prompt_tokens + row.output_tokens
    return found


async def storm(stack: Stack, names: list[str], seconds: float) -> tuple[Counter[str], Seen]:
    """Run the storm; return the tokens that each tenant used in the measured time."""
    capacity = RUNNING / STEP_S / OUTPUT_TOKENS  # requests a second
    rate = OVERLOAD * capacity / (len(names) - 1 + HOSTILE_RATE)
    seen, rng = Seen(), random.Random(1)
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=stack.gateways[0].url, timeout=ANSWER_LIMIT_S, limits=limits) as one,
        httpx.AsyncClient(base_url=stack.gateways[1].url, timeout=ANSWER_LIMIT_S, limits=limits) as two,
        await Broker.connect(stack.redis_url) as broker,
    ):
        tasks = [
            asyncio.create_task(ordinary((one, two)[place % 2], name, rate, seen, random.Random(place)))
            for place, name in enumerate(names)
            if name != HOSTILE
        ]
        tasks.append(asyncio.create_task(hostile(two, HOSTILE_RATE * rate, seen, rng)))
        await asyncio.sleep(WARM_UP_S)
        before = await used(broker)
        seen.outcomes.clear()
        seen.waits_s.clear()
        await asyncio.sleep(seconds)
        after = await used(broker)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Counter({name: after[name] - before[name] for name in names}), seen


def report(tokens: Counter[str], seen: Seen, options: argparse.Namespace) -> bool:
    """Print what came out; return whether each ordinary tenant has its share."""
    total, others = sum(tokens.values()), sorted(name for name in tokens if name != HOSTILE)
    equal = total / len(tokens)
    # What the hostile one leaves of its share goes to the others.
    share = (total - min(tokens[HOSTILE], equal)) / len(others)
    parts = {name: tokens[name] / share for name in others}
    sent = sum(seen.outcomes.values())
    done = sum(number for (_, code), number in seen.outcomes.items() if code == httpx.codes.OK)
    refused = Counter({name: number for (name, code), number in seen.outcomes.items() if code == 429})
    off = {name: part for name, part in parts.items() if abs(part - 1) > MOST_OFF}
    found = {
        "policy": options.policy,
        "limits": options.limits,
        "seconds": options.seconds,
        "tokens": total,
        "output limit, tokens": round(RUNNING / STEP_S * options.seconds),
        "least share": round(min(parts.values()), 3),
        "greatest share": round(max(parts.values()), 3),
        "further than 10 %": len(off),
        "hostile share": round(tokens[HOSTILE] / equal, 3),
        "outcomes a second": round(sent / options.seconds, 1),
        "answers a second": round(done / options.seconds, 1),
        "refused ordinary": sum(number for name, number in refused.items() if name != HOSTILE),
        "refused hostile": refused[HOSTILE],
        "wait p50, s": round(quantiles(seen.waits_s, n=100)[49], 2),
        "wait p99, s": round(quantiles(seen.waits_s, n=100)[98], 2),
    }
    for name, value in found.items():
        print(f"{name + ':':22} {value}")
    print("shares:", " ".join(f"{part:.2f}" for part in sorted(parts.values())))
    if options.json:
        options.json.write_text(json.dumps(found | {"shares": parts}, indent=2))
    return not off


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--policy", default="fair", help="the engines' (default %(default)s)")
    parser.add_argument("--limits", action="store_true", help="give the hostile tenant limits")
    parser.add_argument("--seconds", type=float, default=150.0, help="measured time (default %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    names = [f"tenant-{number:02d}" for number in range(TENANTS - 1)] + [HOSTILE]
    os.environ[PACE] = str(STEP_S)
    os.environ["PAGESTREAM_BROKER__MAX_QUEUED_REQUESTS"] = str(QUEUED)
    with tempfile.TemporaryDirectory() as folder:
        keys, limits = Path(folder) / "keys", Path(folder) / "limits.yaml"
        keys.write_text("".join(f"{hashlib.sha256(name.encode()).hexdigest()} -> {name}\n" for name in names))
        per_minute = round(60 * RUNNING / STEP_S / TENANTS * (1 + PROMPT_TOKENS / OUTPUT_TOKENS))
        limits.write_text(GIVEN.format(running=4, tokens=per_minute))
        engine = (
            "--max-num-seqs",
            str(RUNNING),
            "--max-num-batched-tokens",
            "512",
            "--scheduling-policy",
            options.policy,
        )
        stack = Stack(
            Path(folder), model=DEMO_MODEL, engine_options=engine, engine_module="support.engines.paced_worker"
        )
        try:
            stack.redis.start()
            stack.add_engine()
            for _ in range(2):
                stack.add_gateway("--api-keys", str(keys), *(("--limits", str(limits)) if options.limits else ()))
            stack.wait_ready()
            tokens, seen = asyncio.run(storm(stack, names, options.seconds))
        finally:
            stack.stop()
    return 0 if report(tokens, seen, options) else 1


if __name__ == "__main__":
    sys.exit(main())
