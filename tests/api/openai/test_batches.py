"""/v1/batches by the official client: every job has one result, whatever happens to the gateways that drive them."""

import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import Batch
from pagestream_gateway import BatchSettings, Settings
from pagestream_streams import EmbeddedRedis, StreamsSettings
from support.clients.gateway_clients import Address, gateway_settings, write_keys
from support.engines.synthetic_engine import FAILING_TOKEN, MAX_MODEL_LEN, MODEL, SyntheticEngine, answer_text
from support.processes.fork_server import GATEWAYS, shared_server
from support.processes.stack import ForkedGateway, free_port
from support.protocol.token_streams import eventually
from support.redis.topologies import ask_all

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

Another = Callable[[Settings], AbstractAsyncContextManager[Address]]
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
QUICK = BatchSettings(lease_s=1.0)


@pytest.fixture(scope="module")
def settings(redis_url: str) -> Settings:
    return replace(gateway_settings(redis_url), batches=QUICK)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_client(shared_gateway: Address) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(shared_gateway) as made:
        yield made


@pytest.fixture
def client(shared_client: openai.AsyncOpenAI, engine: SyntheticEngine) -> openai.AsyncOpenAI:
    return shared_client


def client_of(address: Address, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key=key, max_retries=0)


def line(custom_id: str, url: str = COMPLETIONS, **more: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": custom_id, "max_tokens": 4, **more}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def lines(number: int, **more: Any) -> list[dict[str, Any]]:
    return [line(f"job-{place}", **more) for place in range(number)]


async def begun(client: openai.AsyncOpenAI, jobs: Iterable[Any], endpoint: Any = COMPLETIONS, **more: Any) -> Batch:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in jobs)
    file = await client.files.create(file=("jobs.jsonl", text.encode()), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, **{"completion_window": "24h", "metadata": {"a": "b"}, **more}
    )


async def at(client: openai.AsyncOpenAI, batch: Batch, *statuses: str) -> Batch:
    """Return the batch once it has one of the statuses."""
    found = batch

    async def is_there() -> bool:
        nonlocal found
        found = await client.batches.retrieve(batch.id)
        return found.status in statuses

    await eventually(is_there)
    return found


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(each) for each in (await client.files.content(file_id)).text.splitlines()]


def names(found: Iterable[dict[str, Any]]) -> list[str]:
    return sorted(each["custom_id"] for each in found)


async def test_jobs_run_to_an_output_and_errors(client: openai.AsyncOpenAI, engine: SyntheticEngine) -> None:
    """There are more of them than are in flight at once; one fails in the engine, one before it."""
    jobs = lines(70)
    wrong = [line("fails", prompt=[FAILING_TOKEN]), line("long", prompt="x" * MAX_MODEL_LEN)]
    batch = await begun(client, [*jobs, "", *wrong])
    assert (batch.status, batch.metadata, batch.endpoint) == ("validating", {"a": "b"}, COMPLETIONS)
    ended = await at(client, batch, "completed")
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": 72, "completed": 70, "failed": 2}
    assert ended.usage is not None
    assert ended.usage.output_tokens == 280
    assert None not in (ended.in_progress_at, ended.finalizing_at, ended.completed_at, ended.expires_at)
    found = await results(client, ended.output_file_id)
    assert names(found) == names(jobs)
    specs = {spec.client_request_id: spec for spec in engine.claimed}
    assert {spec.priority for spec in specs.values()} == {2}
    for each in found:
        answer, spec = each["response"], specs[each["custom_id"]]
        assert (answer["status_code"], answer["request_id"], each["error"]) == (200, spec.request_id, None)
        assert answer["body"]["choices"][0]["text"] == answer_text(spec, 0)
    assert len({each["id"] for each in found}) == len(found)
    errors = {each["custom_id"]: each["response"] for each in await results(client, ended.error_file_id)}
    assert {name: each["status_code"] for name, each in errors.items()} == {"fails": 500, "long": 400}
    assert errors["long"]["body"]["error"]["code"] == "context_length_exceeded"
    files = {file.id: file.purpose async for file in client.files.list()}
    assert files[ended.output_file_id or ""] == "batch_output"
    assert [each.id for each in (await client.batches.list(limit=1)).data] == [batch.id]
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)
    assert (await client.files.delete(ended.input_file_id)).deleted


SAID = [{"role": "user", "content": "hello"}]
KINDS: list[tuple[str, dict[str, Any]]] = [
    (CHATS, {"model": MODEL, "messages": SAID, "max_tokens": 4, "seed": 0}),
    (RESPONSES, {"model": MODEL, "input": "hello", "max_output_tokens": 4, "seed": 0}),
]


async def test_jobs_may_be_in_the_body(http: httpx.AsyncClient) -> None:
    for endpoint, body in KINDS:
        jobs = [{"custom_id": "a", "body": body}]
        made = await http.post("/v1/batches", json={"endpoint": endpoint, "requests": jobs})
        path, batch = f"/v1/batches/{made.json()['id']}", dict[str, Any]()

        async def has_ended(path: str = path, batch: dict[str, Any] = batch) -> bool:
            batch.update((await http.get(path)).json())
            return bool(batch["status"] == "completed")

        await eventually(has_ended)
        [line] = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text.splitlines()
        response = json.loads(line)["response"]
        asked_for = [each["id"] for each in (await http.get("/v1/requests")).json()["data"]]
        assert response["request_id"] not in asked_for, "jobs are not among the requests that were asked for"
        direct = (await http.post(endpoint, json=body)).json()
        varying = ("id", "created", "created_at", "output", "system_fingerprint")
        assert {name: value for name, value in response["body"].items() if name not in varying} == {
            name: value for name, value in direct.items() if name not in varying
        }


async def test_lines_are_as_python_splits_them(client: openai.AsyncOpenAI) -> None:
    """They end in either way, some are blank, and some are longer than what is read of a file at once. Some editors put
    a mark of byte order before the first one."""
    long = json.dumps(line("long", metadata={"a": "x" * 600_000}))
    texts = [json.dumps(line("first")), " ", long, "", json.dumps(line("last"))]
    content = BOM_UTF8 + "\r\n".join(texts).encode() + b"\n\n"
    file = await client.files.create(file=("jobs.jsonl", content), purpose="batch")
    made = await client.batches.create(input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h")
    ended = await at(client, made, "completed", "failed")
    assert ended.errors is None
    found = [await results(client, each) for each in (ended.output_file_id, ended.error_file_id)]
    assert names(found[0] + found[1]) == ["first", "last", "long"]
    bad = [json.dumps(line("good")), "{", *[""] * 3, "[]"]
    failed = await at(client, await begun(client, bad), "failed")
    assert failed.errors is not None
    assert [each.line for each in failed.errors.data or ()] == [2, 6]


BAD: list[tuple[Any, str, str | None]] = [
    ("{", "invalid_value", None),
    ("[]", "invalid_value", None),
    ({"body": {}}, "invalid_value", "custom_id"),
    (line("x0", url=CHATS), "invalid_value", "url"),
    (line("x1", max_tokens=0), "invalid_value", "body.max_tokens"),
    (line("x2", stream=True), "unsupported_parameter", "body.stream"),
    (line("x3", model="none"), "model_not_found", "body.model"),
    (line("job-1"), "duplicate_custom_id", None),
]


async def test_no_job_runs_of_a_file_with_a_bad_line(client: openai.AsyncOpenAI, engine: SyntheticEngine) -> None:
    batch = await begun(client, [*lines(3), *(bad for bad, _, _ in BAD)])
    failed = await at(client, batch, "failed")
    assert failed.errors is not None
    found = [(each.line, each.code, each.param) for each in failed.errors.data or ()]
    assert found == [(4 + place, code, field) for place, (_, code, field) in enumerate(BAD)]
    assert engine.claimed == []
    assert (failed.output_file_id, failed.error_file_id) == (None, None)
    empty = await at(client, await begun(client, ["", " "]), "failed")
    assert empty.errors is not None
    assert [each.code for each in empty.errors.data or ()] == ["empty_file"]


async def test_bad_batches_are_refused(http: httpx.AsyncClient) -> None:
    made = {"endpoint": COMPLETIONS, "requests": lines(1)}
    for more, status, field in (
        ({"requests": None}, 400, "input_file_id"),
        ({"input_file_id": "file-x"}, 400, "input_file_id"),
        ({"requests": None, "input_file_id": "file-x"}, 404, "file_id"),
        ({"completion_window": "8d"}, 400, "completion_window"),
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"metadata": {str(number): "" for number in range(17)}}, 400, "metadata"),
    ):
        answer = await http.post("/v1/batches", json={**made, **more})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, field), answer.text
    for path in ("/v1/batches/batch_x", "/v1/batches?after=batch_x"):
        assert (await http.get(path)).status_code in (400, 404)


@pytest.mark.parametrize(("window", "status"), [("24h", "cancelled"), ("3s", "expired")])
async def test_a_batch_that_is_stopped_ends_its_jobs(
    client: openai.AsyncOpenAI, engine: SyntheticEngine, window: str, status: str
) -> None:
    """Those that have their answer keep it; each other one has its line among the errors."""
    engine.hold_at = 3
    jobs = [*lines(5, max_tokens=1), *(line(f"held-{place}") for place in range(120))]
    batch = await begun(client, jobs, completion_window=window)
    if status == "cancelled":
        await eventually(lambda: len(engine.claimed) >= 60)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
    ended = await at(client, batch, status)
    done, undone = [await results(client, each) for each in (ended.output_file_id, ended.error_file_id)]
    if status == "cancelled":
        assert names(done) == [f"job-{place}" for place in range(5)]
    assert names([*done, *undone]) == names(jobs)
    assert {each["error"]["code"] for each in undone} == {f"batch_{status}"}
    assert ended.request_counts is not None
    assert ended.request_counts.failed == len(jobs) - len(done) >= 120
    assert len(engine.claimed) < 100, "the others have not run"
    engine.go_on()


def requests_of_each_job(engine: SyntheticEngine) -> set[int]:
    """Return how many requests there were for a job, each counted once however often an engine has claimed it."""
    pairs = {(spec.client_request_id, spec.request_id) for spec in engine.claimed}
    return set(Counter(name for name, _ in pairs).values())


async def test_another_gateway_goes_on_after_a_kill(
    engine: SyntheticEngine, redis_url: str, settings: Settings, another: Another, tmp_path: Path
) -> None:
    port = free_port()
    command = ["pagestream_gateway.__main__", "--redis", redis_url, "--http-port", str(port), "--grpc-port", "0"]
    log = tmp_path / "gateway.log"
    environment = {"PAGESTREAM_BATCHES__LEASE_S": "1", "PAGESTREAM_BATCHES__JOBS_IN_FLIGHT": "32"}
    first = ForkedGateway("first", command, log, environment, server=shared_server(*GATEWAYS), http_port=port)
    first.start()
    jobs = lines(80)
    try:
        await eventually(first.has_become_ready)
        async with client_of(Address(port, 0)) as client:
            batch = await begun(client, jobs)
            await eventually(lambda: len(engine.claimed) > 20)
            engine.hold_at = 3
            await eventually(lambda: len(engine.claimed) > 32)
        async with another(settings) as address, client_of(address) as client:
            first.kill()
            engine.go_on()
            ended = await at(client, batch, "completed")
            found = await results(client, ended.output_file_id)
    finally:
        first.stop()
    assert names(found) == names(jobs)
    assert requests_of_each_job(engine) == {1}


async def test_a_gateway_that_stops_leaves_its_batches_at_once(
    engine: SyntheticEngine, settings: Settings, another: Another
) -> None:
    """Its lease would last longer than the test."""
    lasting = replace(settings, batches=replace(QUICK, lease_s=600.0))
    engine.hold_at = 2
    async with another(settings) as address, client_of(address) as client:
        async with another(lasting) as stopping, client_of(stopping) as other:
            batch = await begun(other, lines(80))
            await eventually(lambda: len(engine.claimed) >= 64)
        engine.go_on()
        ended = await at(client, batch, "completed")
        assert len(await results(client, ended.output_file_id)) == 80
    assert requests_of_each_job(engine) == {1}


async def test_a_full_queue_and_a_full_redis_are_waited_for(
    engine: SyntheticEngine, settings: Settings, another: Another, redis_server: EmbeddedRedis
) -> None:
    engine.hold_at = 2
    narrow = replace(settings, broker=StreamsSettings(max_queued_requests=4, retry_after_max_s=1.0))
    async with another(narrow) as address, client_of(address) as client:
        batch = await begun(client, lines(80))

        async def waits_for(code: str) -> bool:
            found = await client.batches.retrieve(batch.id)
            return found.model_dump()["waits_for"] == code

        ask_all(redis_server, "CONFIG", "SET", "maxmemory", 1)
        try:
            await eventually(lambda: waits_for("storage_full"))
        finally:
            ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)
        engine.go_on()
        ended = await at(client, batch, "completed")
        assert len(await results(client, ended.output_file_id)) == 80
    assert requests_of_each_job(engine) == {1}


async def test_no_job_begins_without_room_for_its_output(
    engine: SyntheticEngine, settings: Settings, another: Another, tmp_path: Path
) -> None:
    jobs = lines(8, max_tokens=100, ignore_eos=True)
    keys = write_keys(tmp_path / "keys", {"ours": "ours-alone"})
    small = replace(
        settings,
        gateway=replace(settings.gateway, api_keys=keys),
        batches=replace(QUICK, jobs_in_flight=2, max_tenant_bytes=3000),
    )
    async with another(small) as address, client_of(address, "ours") as client:
        batch = await begun(client, jobs)

        async def is_waiting() -> bool:
            return (await client.batches.retrieve(batch.id)).model_dump()["waits_for"] == "files_full"

        await eventually(is_waiting)
        assert len(engine.claimed) < len(jobs)
        with pytest.raises(openai.ConflictError, match="has not ended"):
            await client.files.delete(batch.input_file_id)
        await client.batches.cancel(batch.id)
        ended = await at(client, batch, "cancelled")
        both = [each for file in (ended.output_file_id, ended.error_file_id) for each in await results(client, file)]
        assert names(both) == names(jobs)


async def test_another_tenants_batch_does_not_exist(
    engine: SyntheticEngine, redis_url: str, another: Another, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", {"ours": "ours", "others": "others"})
    async with (
        another(replace(gateway_settings(redis_url, keys=keys), batches=QUICK)) as address,
        client_of(address, "ours") as ours,
        client_of(address, "others") as others,
    ):
        batch = await begun(ours, lines(2))
        ended = await at(ours, batch, "completed")
        for call in (others.batches.retrieve, others.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(batch.id)
        with pytest.raises(openai.NotFoundError):
            await others.files.content(ended.output_file_id or "")
        with pytest.raises(openai.NotFoundError):
            await others.batches.create(
                input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
            )
        assert [each async for each in others.batches.list()] == []
    assert {spec.tenant for spec in engine.claimed} == {"ours"}
