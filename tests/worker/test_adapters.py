"""LoRA adapters through a gateway and a real engine: loaded while they run, named as models, pinned by their digest."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagestream_cli.__main__ import main
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.request import LoRARequest
from pagestream_streams import Broker
from pagestream_streams.admin import adapter_revision
from support.clients.gateway_clients import gateway_settings, running_address
from support.engines.arithmetic_worker import MODEL, running_worker
from support.engines.lora_adapters import make_adapter
from support.engines.tiny_models import make_model, random_prompts
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64, "enable_lora": True}
(PROMPT,) = random_prompts([20])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama") / "model", "llama")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(model, tmp_path_factory.mktemp("adapter") / "small", seed=1)


@asynccontextmanager
async def serving(redis_url: str, model: Path, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = gateway_settings(redis_url)
    async with (
        await Broker.connect(redis_url) as broker,
        running_worker(broker, model, None, **{**OPTIONS, **options}),
        running_address(replace(settings, gateway=replace(settings.gateway, allow_runtime_lora=True))) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
    ):
        yield client


async def complete(client: httpx.AsyncClient, name: str) -> httpx.Response:
    body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    return await client.post("/v1/completions", json=body)


def expected(model: Path, adapter: Path | None) -> str:
    llm = LLM(model, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    named = None if adapter is None else LoRARequest("a", 1, str(adapter))
    return llm.generate([PROMPT], params, lora_request=named)[0].outputs[0].text


async def test_an_adapter_comes_and_goes(redis_url: str, model: Path, adapter: Path) -> None:
    body = {"lora_name": "small", "lora_path": str(adapter)}
    async with serving(redis_url, model) as client:
        assert (await complete(client, "small")).json()["error"]["code"] == "model_not_found"
        assert (await client.post("/v1/load_lora_adapter", json=body)).status_code == 200
        again = await client.post("/v1/load_lora_adapter", json=body)
        assert (again.status_code, again.json()["error"]["code"]) == (400, "adapter_refused")
        assert "'small' is loaded already" in again.json()["error"]["message"]
        listed = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
        assert listed["small"]["parent"] == MODEL
        assert listed["small"]["revision"] == adapter_revision(adapter)
        adapted, plain = await asyncio.gather(complete(client, "small"), complete(client, MODEL))
        assert [adapted.json()["model"], plain.json()["model"]] == ["small", MODEL]
        assert adapted.json()["choices"][0]["text"] == expected(model, adapter)
        assert plain.json()["choices"][0]["text"] == expected(model, None)
        assert (await client.post("/v1/unload_lora_adapter", json={"lora_name": "small"})).status_code == 200
        assert (await complete(client, "small")).json()["error"]["code"] == "model_not_found"
        again = await client.post("/v1/unload_lora_adapter", json={"lora_name": "small"})
        assert again.json()["error"]["code"] == "model_not_found"


async def test_an_adapter_is_replaced_in_place(redis_url: str, model: Path, adapter: Path, tmp_path: Path) -> None:
    other = make_adapter(model, tmp_path / "other", seed=5)
    assert expected(model, other) != expected(model, adapter)
    async with serving(redis_url, model) as client:
        for folder, options, status in (
            (adapter, {"load_inplace": True}, 200),  # also where none is loaded
            (other, {"load_inplace": False}, 400),
            (other, {"load_inplace": True}, 200),
            (adapter, {"load_inplace": True}, 200),
        ):
            body = {"lora_name": "small", "lora_path": str(folder), **options}
            answer = await client.post("/v1/load_lora_adapter", json=body)
            assert answer.status_code == status, answer.text
            served = adapter if status == 400 else folder
            assert (await complete(client, "small")).json()["choices"][0]["text"] == expected(model, served)
            listed = {each["id"]: each for each in (await client.get("/v1/models")).json()["data"]}
            assert listed["small"]["root"] == str(served)


async def test_files_that_have_changed_fail_their_requests_alone(
    redis_url: str, model: Path, adapter: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(adapter, tmp_path / "changing"))
    async with serving(redis_url, model) as client:
        await client.post("/v1/load_lora_adapter", json={"lora_name": "changing", "lora_path": str(folder)})
        make_adapter(model, folder, seed=9)
        changed, plain = await asyncio.gather(complete(client, "changing"), complete(client, MODEL))
        assert changed.status_code == 500
        assert adapter_revision(adapter) in changed.json()["error"]["message"]
        assert plain.json()["choices"][0]["text"] == expected(model, None)


async def test_refusals(redis_url: str, model: Path, adapter: Path, tmp_path: Path) -> None:
    async with serving(redis_url, model, enable_lora=False) as client:

        async def load(**fields: str) -> httpx.Response:
            body = {"lora_name": "small", "lora_path": str(adapter), **fields}
            return await client.post("/v1/load_lora_adapter", json=body)

        unreadable = await load(lora_path=str(tmp_path / "none"))
        assert (unreadable.status_code, unreadable.json()["error"]["code"]) == (400, "adapter_refused")
        cut = Path(shutil.copytree(adapter, tmp_path / "cut"))
        os.truncate(cut / "adapter_model.safetensors", (adapter / "adapter_model.safetensors").stat().st_size - 4)
        refused = await load(lora_path=str(cut))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "adapter_refused")
        assert "it may be cut off" in refused.json()["error"]["message"]
        assert (await load(lora_name=MODEL)).json()["error"]["param"] == "lora_name"
        assert (await load(base_model_name="none")).json()["error"]["code"] == "model_not_found"
        assert (await load()).status_code == 200
        assert "unload it first" in (await load(revision="0" * 32)).json()["error"]["message"]
        refused = await complete(client, "small")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        assert "enable_lora" in refused.json()["error"]["message"]
        assert "x-request-id" not in refused.headers, "refused before it is accepted"


async def test_without_the_setting_there_are_no_such_calls(redis_url: str) -> None:
    async with (
        running_address(gateway_settings(redis_url)) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
    ):
        assert (
            await client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/a"})
        ).status_code == 404


async def test_the_command(redis_url: str, model: Path, adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(redis_url, model) as client:
        where = ["--redis", redis_url]
        assert await asyncio.to_thread(main, ["adapters", "load", "small", str(adapter), *where]) == 0
        assert await asyncio.to_thread(main, ["adapters", "list", *where]) == 0
        assert adapter_revision(adapter) in capsys.readouterr().out
        assert (await complete(client, "small")).json()["choices"][0]["text"] == expected(model, adapter)
        assert await asyncio.to_thread(main, ["adapters", "unload", "small", *where]) == 0
