"""One engine process, several models: real processes behind a gateway, which know each other through Redis alone."""

import asyncio
import json
import os
import shutil
from asyncio import TaskGroup
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagestream_cli.__main__ import main
from pagestream_engine import LLM, SamplingParams
from redis import Redis
from support.clients.gateway_clients import sse_events
from support.engines.tiny_models import make_model, random_prompts
from support.processes.stack import Stack, running_stack
from support.protocol.token_streams import eventually

LIMIT_S = 500.0
pytestmark = [pytest.mark.served, pytest.mark.timeout(600)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 512}
FLAGS = ["--dtype", "float32", "--device", "cpu", "--num-gpu-blocks-override", "512"]
(PROMPT,) = random_prompts([20])
SHORT, SOME, LONG = 8, 200, 1000
LONGER = 7500  # than any machine takes to hear of another request
MIN_SERVE = "PAGESTREAM_WORKER__MIN_SERVE_S"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {
        name: make_model(root / name, "llama", seed=seed, max_position_embeddings=8192)
        for seed, name in enumerate(("demo", "other"))
    }
    broken = found["broken"] = Path(shutil.copytree(found["other"], root / "broken"))
    weights = broken / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    return found


@pytest.fixture(scope="module")
def stack(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("stack")
    models = ",".join(f"{name}={folders[name]}" for name in ("other", "broken"))
    with (
        pytest.MonkeyPatch.context() as patch,
        running_stack(
            root,
            model=folders["demo"],
            engines=0,
            gateways=0,
            engine_options=[*FLAGS, "--models", models],
            is_forked=True,
        ) as stack,
    ):
        patch.setenv("PAGESTREAM_WORKER__SWITCH_FINISH_S", "0.01")
        patch.setenv(MIN_SERVE, "0.01")
        patch.setenv("PAGESTREAM_GATEWAY__ALLOW_MODEL_CHANGES", "true")
        stack.add_engine()
        stack.add_gateway()
        stack.wait_ready()
        patch.setenv(MIN_SERVE, "600")  # from its next start on: each model is served to the end
        yield stack


def expected(folder: Path, max_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return LLM(folder, **OPTIONS).generate([PROMPT], params)[0].outputs[0].text


async def complete(client: httpx.AsyncClient, model: str, max_tokens: int = SHORT) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    return await client.post("/v1/completions", json=body)


def row(stack: Stack) -> dict[str, Any]:
    """The engine's row."""
    with Redis.from_url(stack.redis_url, decode_responses=True) as client:
        fields = client.hgetall("ps:engine-roster")
    rows = [json.loads(text.partition(" ")[2]) for name, text in fields.items() if name.startswith("engine:")]
    return rows[-1] if rows else {}


async def eventually_row(stack: Stack, **fields: Any) -> None:
    for _ in range(int(LIMIT_S / 0.01)):
        if fields.items() <= row(stack).items():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"Redis has {row(stack)}, {fields} was expected")


@dataclass
class Reading:
    """A stream that is read as it comes."""

    request_id: str = ""
    text: str = ""
    num_entries: int = 0
    """Of its log: at least as many as tokens."""

    async def read(self, client: httpx.AsyncClient, model: str, max_tokens: int) -> None:
        body = {"model": model, "prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            self.request_id = answer.headers["x-request-id"]
            async for event in sse_events(answer):
                if event.data != "[DONE]":
                    self.text += "".join(choice["text"] for choice in event.body["choices"])
                    self.num_entries = event.next_index

    async def until(self, num_entries: int) -> None:
        await eventually(lambda: self.num_entries >= num_entries, limit_s=LIMIT_S)


@pytest.mark.slow
async def test_an_engine_killed_as_it_changes_its_model_loses_no_request_of_either(
    stack: Stack, folders: dict[str, Path]
) -> None:
    async with httpx.AsyncClient(base_url=stack.gateways[0].url, timeout=LIMIT_S) as client, TaskGroup() as tasks:
        first = Reading()
        reading = tasks.create_task(first.read(client, "demo", LONGER))
        await eventually_row(stack, serving="demo", active=1)
        other = tasks.create_task(complete(client, "other", LONG))
        await eventually_row(stack, serving="other", is_loading=True)
        log = stack.engines[0].log
        await eventually(lambda: "requests are handed back" in log.read_text(), limit_s=LIMIT_S)
        stack.engines[0].kill()
        stack.engines[0].start()
        assert not reading.done(), "the first request ended before the change"
        await first.until(first.num_entries + SOME)
        await client.delete(f"/v1/requests/{first.request_id}")
        assert expected(folders["demo"], first.num_entries).startswith(first.text)
        answer = (await other).json()["choices"][0]["text"]
        assert answer == expected(folders["other"], LONG)


async def test_an_engine_sleeps_with_its_weights_and_requests_wake_it(stack: Stack, folders: dict[str, Path]) -> None:
    def num_woken() -> int:
        return stack.engines[0].log.read_text().count("wake_up_s")

    async with httpx.AsyncClient(base_url=stack.gateways[0].url, timeout=LIMIT_S) as client, TaskGroup() as tasks:
        assert (await complete(client, "demo")).status_code == 200
        assert (await client.post("/sleep")).status_code == 200
        await eventually_row(stack, serving="", is_loading=False, keeps="demo")
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        first = Reading()
        reading = tasks.create_task(first.read(client, "demo", LONGER))
        await eventually_row(stack, serving="demo", active=1, keeps="")
        assert num_woken() == 1
        assert (await client.post("/sleep?level=1")).status_code == 200
        await eventually(lambda: num_woken() == 2, limit_s=LIMIT_S)
        await first.until(first.num_entries + SOME)
        assert not reading.done(), "the request ended before the sleep"
        await client.delete(f"/v1/requests/{first.request_id}")
        await reading
        assert expected(folders["demo"], first.num_entries).startswith(first.text)
        assert (await client.post("/sleep")).status_code == 200
        await eventually_row(stack, keeps="demo")
        assert (await complete(client, "other")).json()["choices"][0]["text"] == expected(folders["other"], SHORT)
        assert num_woken() == 2, "another model's request frees the weights"


async def test_a_model_that_is_cut_off_is_refused_and_hurts_no_other(stack: Stack, folders: dict[str, Path]) -> None:
    async with httpx.AsyncClient(base_url=stack.gateways[0].url, timeout=LIMIT_S) as client:
        broken, sound = await asyncio.gather(complete(client, "broken"), complete(client, "other"))
        assert broken.status_code == 503
        assert "broken/model.safetensors" in broken.json()["error"]["message"]
        assert sound.json()["choices"][0]["text"] == expected(folders["other"], SHORT)


@pytest.mark.slow
async def test_operators_unload_and_load(stack: Stack, folders: dict[str, Path]) -> None:
    async with httpx.AsyncClient(base_url=stack.gateways[0].url, timeout=LIMIT_S) as client:
        name = row(stack)["serving"]
        assert (await client.post("/v1/models/unload", json={"model": name})).json() == {"success": True}
        await eventually_row(stack, serving="", is_loading=False)
        assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
        answer = await complete(client, "demo")  # which wakes it
        assert answer.json()["choices"][0]["text"] == expected(folders["demo"], SHORT)
        asked = ["models", "load", "other", "--wait", str(LIMIT_S), "--redis", stack.redis_url]
        assert await asyncio.to_thread(main, asked) == 0
        assert row(stack)["serving"] == "other"
