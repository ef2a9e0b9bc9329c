"""A prompt that kills each engine which computes it: it is quarantined, and its neighbours lose nothing but time."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagestream_streams import Broker, expire_engine
from support.engines.paced_worker import PACE, POISON, token_at
from support.processes.part import Part
from support.processes.stack import Stack, running_stack
from support.processes.waiting import LIMIT_S, until

pytestmark = pytest.mark.served

POISONOUS = 300
NUM_TOKENS = 200


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    monkeypatch.setenv(PACE, "0.01")
    monkeypatch.setenv(POISON, str(POISONOUS))
    monkeypatch.setenv("PAGESTREAM_BROKER__ALONE_AFTER_MS", "100")
    with running_stack(tmp_path, engines=2, engine_module="support.engines.paced_worker", is_forked=True) as running:
        yield running


async def supervise(broker: Broker, engine: Part, deaths: list[str]) -> None:
    """What `pagestream serve` does: say that the engine is dead, and start it again."""
    while True:
        await until(lambda: not engine.is_alive(), f"{engine.name} has ended")
        engine.wait()
        deaths.append(engine.name)
        await expire_engine(broker, engine.name)
        engine.start()


async def complete(client: httpx.AsyncClient, prompt: list[int]) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return await client.post("/v1/completions", json=body)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    found: list[int] = choice["token_ids"]
    return found


async def test_poison_is_quarantined_and_its_neighbours_go_on(stack: Stack) -> None:
    deaths: list[str] = []
    async with (
        await Broker.connect(stack.redis_url) as broker,
        httpx.AsyncClient(base_url=stack.gateways[0].url, timeout=LIMIT_S) as client,
    ):
        supervisors = [asyncio.create_task(supervise(broker, engine, deaths)) for engine in stack.engines]
        try:
            prompts = [[number, 5, 6] for number in range(11, 14)]
            *neighbours, refused = await asyncio.gather(
                *(complete(client, prompt) for prompt in (*prompts, [POISONOUS, 5, 6]))
            )
            later = await complete(client, prompts[0])
        finally:
            for each in supervisors:
                each.cancel()
        [dead] = await broker.quarantined("demo")
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "quarantined")
    assert refused.headers["x-should-retry"] == "false"
    assert (dead.request_id, dead.next_index, len(dead.engines)) == (refused.headers["x-request-id"], 0, 4)
    assert len(deaths) in (4, 5), "the first engine may die before it could say that the prompt is in its step"
    for prompt, answer in zip((*prompts, prompts[0]), (*neighbours, later), strict=True):
        start = prompt[0] + len(prompt)
        assert tokens(answer) == [token_at(start + place) for place in range(NUM_TOKENS)]
