"""SIGKILL of gateways under the official `openai` client, whose transport continues by the request's id.

The gateways are processes; the engine's tokens are made up.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from pagestream_client.openai import transport
from support.engines.synthetic_engine import MODEL, SyntheticEngine, answer_text, running_engine
from support.processes.stack import DEMO_MODEL, Stack
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served

NUM_TOKENS = 40
KILLS_AT = (1, 20)
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": NUM_TOKENS}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hello"}],
    "max_completion_tokens": NUM_TOKENS,
}


@asynccontextmanager
async def gateways_and_engine(folder: Path) -> AsyncIterator[tuple[Stack, SyntheticEngine]]:
    """Run Redis and one gateway more than are killed as processes, and an engine in this one."""
    stack = Stack(folder, model=DEMO_MODEL, engine_options=(), is_forked=True)
    try:
        stack.redis.start()
        async with running_engine(stack.redis_url) as engine:
            for _ in range(len(KILLS_AT) + 1):
                stack.add_gateway()
            await asyncio.to_thread(stack.wait_ready)
            yield stack, engine
    finally:
        await asyncio.to_thread(stack.stop)


async def ask(client: openai.AsyncOpenAI) -> str:
    answer = await client.chat.completions.create(**CHAT)
    return answer.choices[0].message.content or ""


async def stream(client: openai.AsyncOpenAI) -> str:
    chunks = await client.chat.completions.create(**CHAT, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


def ask_blocking(client: openai.OpenAI) -> str:
    return client.completions.create(**COMPLETION).choices[0].text


def stream_blocking(client: openai.OpenAI) -> str:
    return "".join(chunk.choices[0].text for chunk in client.completions.create(**COMPLETION, stream=True))


async def test_every_form_of_answer_survives_the_death_of_its_gateway(tmp_path: Path) -> None:
    async with asyncio.timeout(LIMIT_S), gateways_and_engine(tmp_path) as (stack, engine):
        gateways = {gateway.url: gateway for gateway in stack.gateways}
        resuming = transport(list(gateways))
        base_url = f"{stack.gateways[0].url}/v1"
        engine.hold_at = KILLS_AT[0]
        async with (
            openai.AsyncOpenAI(
                base_url=base_url, api_key="none", max_retries=0, http_client=httpx2.AsyncClient(transport=resuming)
            ) as client,
            asyncio.TaskGroup() as tasks,
        ):
            blocking = openai.OpenAI(
                base_url=base_url, api_key="none", max_retries=0, http_client=httpx2.Client(transport=resuming)
            )
            answers = [
                tasks.create_task(ask(client)),
                tasks.create_task(stream(client)),
                tasks.create_task(asyncio.to_thread(ask_blocking, blocking)),
                tasks.create_task(asyncio.to_thread(stream_blocking, blocking)),
            ]
            for place, next_place in zip(KILLS_AT, [*KILLS_AT[1:], None], strict=True):
                await eventually(lambda place=place: engine.num_tokens == place * len(answers))
                await asyncio.to_thread(gateways[resuming._configuration.endpoints.current].kill)
                engine.go_on(next_place)
        blocking.close()
    texts = sorted(answer_text(spec, 0) for spec in engine.claimed)
    assert sorted(task.result() for task in answers) == texts
    assert len(texts) == len(answers), "a request was asked for twice"
