"""What tenants and keys may use: headers, refusals of both APIs, models, changes of the file, and usage."""

import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway import Settings
from pagestream_streams import Broker, EmbeddedRedis
from pagestream_streams.limits import read_usage
from support.clients.gateway_clients import (
    Address,
    bearer,
    gateway_settings,
    grpc_stub,
    lose,
    refusal,
    running_address,
    write_keys,
)
from support.engines.synthetic_engine import MODEL, SyntheticEngine, running_engine
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually
from support.redis.servers import emptied

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 2}
NAMES = {each: hashlib.sha256(each.encode()).hexdigest()[:12] for each in ("a", "b", "c")}


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of a Redis without any keys: what tenants have used stands there."""
    return emptied(redis_server)


@pytest_asyncio.fixture(loop_scope="module")
async def engine(redis_url: str) -> AsyncIterator[SyntheticEngine]:
    async with running_engine(redis_url) as running:
        yield running


@pytest.fixture
def limited(redis_url: str, tmp_path: Path) -> Settings:
    """Return the settings of a gateway whose tenants are "a", "b" and "c", each with a key of its name."""
    keys, limits = write_keys(tmp_path / "keys", {each: each for each in NAMES}), tmp_path / "limits.yaml"
    limits.write_text(
        f"""
tenants:
  a: {{requests_per_minute: 3, tokens_per_minute: 1000, tokens_per_day: 90}}
  b: {{models: [other-*]}}
keys:
  "{NAMES["a"]}": {{tokens_per_minute: 400}}
"""
    )
    settings = gateway_settings(redis_url, keys=keys)
    administrators = write_keys(tmp_path / "administrators", {"root": "olga"})
    return replace(settings, gateway=replace(settings.gateway, limits=limits, admin_keys=administrators))


@pytest_asyncio.fixture(loop_scope="module")
async def gateways(engine: SyntheticEngine, limited: Settings) -> AsyncIterator[tuple[Address, Address]]:
    async with running_address(limited) as one, running_address(limited) as two:
        yield one, two


async def test_limits_hold_over_gateways_and_apis(gateways: tuple[Address, Address], redis_url: str) -> None:
    one, two = gateways
    async with httpx.AsyncClient(base_url=one.url, headers=bearer("a")) as client:
        first = await client.post("/v1/completions", json=BODY)
        assert first.status_code == 200
        prompt_tokens = first.json()["usage"]["prompt_tokens"]
        assert first.headers["x-ratelimit-limit-requests"] == "3"
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
        assert first.headers["x-ratelimit-limit-tokens"] == "400", "the key's, which leaves less"
        assert first.headers["x-ratelimit-remaining-tokens"] == str(400 - prompt_tokens - 2)
        assert first.headers["x-ratelimit-remaining-tokens-day"] == str(90 - prompt_tokens - 2)
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        key = {"Idempotency-Key": "k"}
        joined = [await client.post("/v1/chat/completions", json=chat(), headers=key) for _ in range(2)]
        assert joined[0].headers["x-ratelimit-remaining-requests"] == "1"
        assert "x-ratelimit-remaining-requests" not in joined[1].headers
        large = await client.post("/v1/completions", json={**BODY, "max_tokens": 100})
        assert (large.status_code, large.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert large.headers["x-should-retry"] == "false"
        assert "Retry-After" not in large.headers
    async with grpc_stub(two, key="a") as stub:
        asked = api.GenerateRequest(model=MODEL, prompt="hello", sampling=api.SamplingParams(max_tokens=2))
        call = stub.Generate(asked)
        metadata = dict(await call.initial_metadata())
        assert metadata["x-ratelimit-remaining-requests"] == "0"
        async for _ in call:
            pass
        for _ in range(2):  # the second one without Redis
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(asked).read()
            refused = refusal(caught.value)
            assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert 0 < (refused.retry_after_s or 0) <= 61
    async with openai.AsyncOpenAI(base_url=f"{two.url}/v1", api_key="a", max_retries=0) as sdk:
        with pytest.raises(openai.RateLimitError) as limited:
            await sdk.completions.create(model=MODEL, prompt="hello", max_tokens=2)
        answer = limited.value.response
        assert limited.value.code == "rate_limit_exceeded"
        assert 1 <= int(answer.headers["Retry-After"]) <= 61
        assert 0 < int(answer.headers["retry-after-ms"]) <= 61_000
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    async with httpx.AsyncClient(base_url=two.url, headers=bearer("c")) as client:
        free = await client.post("/v1/completions", json=BODY)
        assert free.status_code == 200
        assert not [name for name in free.headers if name.startswith("x-ratelimit")]
        metrics = (await client.get("/metrics", headers=bearer("root"))).text
        assert 'pagestream_tenant_refusals_total{limit="requests_per_minute",tenant="a"} 3.0' in metrics
    async with await Broker.connect(redis_url) as broker:

        async def is_counted() -> bool:
            rows = await read_usage(broker, since_s=7200)
            return {(each.tenant, each.credential, each.model, each.requests, each.output_tokens) for each in rows} == {
                ("a", NAMES["a"], MODEL, 3, 6),
                ("c", NAMES["c"], MODEL, 1, 2),
            }

        await eventually(is_counted)


async def test_a_request_that_is_there_is_repeated_whatever_its_tenant_has_used(
    gateways: tuple[Address, Address], redis_url: str
) -> None:
    one, other = gateways
    async with httpx.AsyncClient(base_url=one.url, headers=bearer("a")) as client:
        answer, *_ = [await client.post("/v1/completions", json=BODY) for _ in range(3)]
    request_id, seed = answer.headers["X-Request-Id"], {"X-Request-Seed": answer.headers["X-Request-Seed"]}
    async with httpx.AsyncClient(base_url=other.url, headers=bearer("a")) as client:
        async with await Broker.connect(redis_url) as broker:
            connection, own = broker.connection, broker.connection.keyspace.tenant_limits("a")

            async def are_counted() -> bool:
                return await connection.execute("ZCARD", f"{own}ended") == 3

            await eventually(are_counted)  # before, the request has its reservation
            await connection.execute("DEL", f"{own}ended")  # as if their ends were of long ago
        again = await client.put(f"/v1/requests/{request_id}", json=BODY, headers=seed)
        assert (again.status_code, again.json()["state"]) == (200, "finished")
        await lose(redis_url, request_id)
        refused = await client.put(f"/v1/requests/{request_id}", json=BODY, headers=seed)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        metrics = (await client.get("/metrics", headers=bearer("root"))).text
        assert 'pagestream_tenant_refusals_total{limit="requests_per_minute",tenant="a"} 1.0' in metrics


def chat() -> dict[str, object]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


async def test_models_that_a_tenant_may_not_use_do_not_exist_for_it(gateways: tuple[Address, Address]) -> None:
    async with httpx.AsyncClient(base_url=gateways[0].url, headers=bearer("b")) as client:
        assert (await client.get("/v1/models")).json()["data"] == []
        assert (await client.get(f"/v1/models/{MODEL}")).status_code == 404
        for body in (BODY, {"prompt": "hello"}):
            refused = await client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.post("/tokenize", json={"model": MODEL, "prompt": "hello"})).status_code == 404
    async with grpc_stub(gateways[0], key="b") as stub, grpc_stub(gateways[0], key="c") as others:
        assert not (await stub.ListModels(api.ListModelsRequest())).models
        assert (await others.ListModels(api.ListModelsRequest())).models


async def test_batches_of_a_model_that_a_tenant_may_not_use_are_refused_as_those_of_none(
    gateways: tuple[Address, Address],
) -> None:
    async with httpx.AsyncClient(base_url=gateways[0].url, headers=bearer("b")) as client:
        problems = [await problem(client, name) for name in (MODEL, "missing")]
    assert problems[0] == {**problems[1], "message": problems[1]["message"].replace("missing", MODEL)}
    assert problems[0]["code"] == "model_not_found"


async def problem(client: httpx.AsyncClient, model: str) -> dict[str, str]:
    """Return why a batch with a job of this model has failed."""
    jobs = [{"custom_id": "a", "body": {"model": model, "prompt": "hello", "max_tokens": 2}}]
    made = await client.post("/v1/batches", json={"endpoint": "/v1/completions", "requests": jobs})
    batch = made.json()

    async def has_ended() -> bool:
        nonlocal batch
        batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
        return batch["status"] in ("failed", "completed")

    await eventually(has_ended)
    [found] = batch["errors"]["data"] if batch["errors"] else [{"code": batch["status"]}]
    return dict(found)


async def test_a_changed_file_counts_and_a_wrong_one_does_not(
    engine: SyntheticEngine, limited: Settings, tmp_path: Path
) -> None:
    admins = write_keys(tmp_path / "admins", {"root": "root"})
    settings = replace(limited, gateway=replace(limited.gateway, admin_keys=admins))
    assert settings.gateway.limits is not None
    async with running_address(settings) as address, httpx.AsyncClient(base_url=address.url) as client:

        async def limit() -> str | None:
            changed = await client.post("/admin/v1/keys/reload", headers=bearer("root"))
            assert changed.status_code == 200, changed.text
            answer = await client.post("/v1/completions", json=BODY, headers=bearer("c"))
            return answer.headers.get("x-ratelimit-limit-requests")

        assert await limit() is None
        for text, expected in (
            (json.dumps({"default": {"requests_per_minute": 50}}), "50"),
            ("default: {requests_per_minute: many}", "50"),
            ("default: {requests_per_minute: 40}", "40"),
        ):
            settings.gateway.limits.write_text(text)
            assert await limit() == expected

        async def is_shown() -> bool:
            answer = await client.get("/admin/v1/usage?hours=2&tenant=c", headers=bearer("root"))
            return sum(each["requests"] for each in answer.json()["data"]) == 4

        await eventually(is_shown)
        for hours in ("0", "9601", "x", "1" * 5000):
            wrong = await client.get(f"/admin/v1/usage?hours={hours}", headers=bearer("root"))
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "hours")
        assert (await client.get("/admin/v1/usage", headers=bearer("c"))).status_code == 403


async def test_an_entry_has_what_it_leaves_out_from_the_default(engine: SyntheticEngine, limited: Settings) -> None:
    assert limited.gateway.limits is not None
    limited.gateway.limits.write_text(
        f"""
default: {{requests_per_minute: 60, tokens_per_day: 1000, models: ["{MODEL[:4]}*", qwen]}}
tenants:
  a: {{requests_per_minute: null, concurrent_requests: 4}}
  b: {{models: null}}
keys:
  "{NAMES["b"]}": {{tokens_per_minute: 900, models: [qwen]}}
"""
    )
    names = ("limit-requests", "limit-tokens", "limit-tokens-day")
    async with running_address(limited) as address, httpx.AsyncClient(base_url=address.url) as client:
        for key, expected in (("c", ["60", None, "1000"]), ("a", [None, None, "1000"])):
            answer = await client.post("/v1/completions", json=BODY, headers=bearer(key))
            assert [answer.headers.get(f"x-ratelimit-{name}") for name in names] == expected, key
        refused = await client.post("/v1/completions", json=BODY, headers=bearer("b"))
        assert refused.status_code == 404, "its tenant may use any model, its key only another"
        for text, found in (("", [None] * 3), ("default: {tokens_per_minute: 70}", [None, "70", None])):
            limited.gateway.limits.write_text(text)
            async with running_address(limited) as other, httpx.AsyncClient(base_url=other.url) as another:
                answer = await another.post("/v1/completions", json=BODY, headers=bearer("b"))
                assert [answer.headers.get(f"x-ratelimit-{name}") for name in names] == found


async def test_a_further_name_of_a_model_is_the_models(limited: Settings, engine: SyntheticEngine) -> None:
    aliases = {"first": MODEL, "second": MODEL, "lost": "no-model"}
    async with (
        running_address(replace(limited, gateway=replace(limited.gateway, model_aliases=aliases))) as address,
        httpx.AsyncClient(base_url=address.url, headers=bearer("c"), timeout=LIMIT_S) as client,
    ):
        listed = {each["id"]: each["root"] for each in (await client.get("/v1/models")).json()["data"]}
        assert listed == dict.fromkeys((MODEL, "first", "second"), MODEL)
        assert (await client.get("/v1/models/second")).json()["id"] == "second"
        for name in ("first", "second"):
            answer = await client.post("/v1/completions", json={**BODY, "model": name})
            assert answer.json()["model"] == engine.claimed[-1].model == MODEL
        assert (await client.post("/v1/completions", json={**BODY, "model": "lost"})).status_code == 404
        refused = await client.post("/v1/completions", json={**BODY, "model": "first"}, headers=bearer("b"))
        assert refused.json()["error"]["code"] == "model_not_found"
        assert "'first'" in refused.json()["error"]["message"]
