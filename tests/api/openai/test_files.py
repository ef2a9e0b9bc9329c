"""/v1/files by the official client: uploads in parts, within their bounds, read by their tenant alone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from pagestream_gateway import BatchSettings, ConnectionSettings, Settings
from pagestream_streams import EmbeddedRedis
from redis.asyncio import Redis
from support.clients.gateway_clients import Address, gateway_settings, write_keys
from support.protocol.token_streams import eventually
from support.redis.topologies import ask_all

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

Another = Callable[[Settings], AbstractAsyncContextManager[Address]]
LINES = b'{"custom_id": "a"}\n' * 30_000
SMALL = BatchSettings(max_file_bytes=300_000, max_tenant_bytes=500_000, max_files=3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(shared_gateway: Address) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(shared_gateway) as made:
        yield made


def client_of(address: Address, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address.url}/v1", api_key=key, max_retries=0)


async def stored_keys(redis_url: str) -> list[str]:
    async with Redis.from_url(redis_url, decode_responses=True) as redis:
        return sorted([key async for key in redis.scan_iter("ps:batches:*")])


async def test_a_file_is_uploaded_listed_read_and_deleted(
    client: openai.AsyncOpenAI, other_gateway: Address, redis_url: str
) -> None:
    assert len(LINES) > 2 * 256 * 1024, "several parts"
    made = await client.files.create(
        file=("jobs.jsonl", LINES), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (made.bytes, made.filename, made.purpose, made.status) == (len(LINES), "jobs.jsonl", "batch", "processed")
    assert made.expires_at is not None
    assert 3599 <= made.expires_at - made.created_at <= 3601
    async with client_of(other_gateway) as other:
        assert await other.files.retrieve(made.id) == made
        assert (await other.files.content(made.id)).content == LINES
        second = await other.files.create(file=("b.jsonl", b"x"), purpose="batch")
    newest = [file.id async for file in client.files.list(limit=1)]
    assert newest == [second.id, made.id]
    assert [file.id async for file in client.files.list(order="asc", purpose="batch")] == newest[::-1]
    for file_id in newest:
        assert (await client.files.delete(file_id)).deleted
    with pytest.raises(openai.NotFoundError, match="no file"):
        await client.files.content(made.id)
    assert [key for key in await stored_keys(redis_url) if not key.endswith("held")] == []


async def test_bounds_are_kept_and_free_what_was_written(another: Another, settings: Settings, redis_url: str) -> None:
    small = replace(settings, batches=SMALL)
    async with another(small) as address, client_of(address) as client:
        for refused, kind in ((LINES, 413), (LINES[:290_000], 200), (LINES[:290_000], 429), (b"x", 200), (b"x", 200)):
            if kind == 200:
                await client.files.create(file=("a", refused), purpose="batch")
                continue
            with pytest.raises(openai.APIStatusError) as caught:
                await client.files.create(file=("a", refused), purpose="batch")
            assert caught.value.status_code == kind
        with pytest.raises(openai.RateLimitError, match="may have 3 files"):
            await client.files.create(file=("a", b"x"), purpose="batch")

        async def unannounced() -> AsyncIterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + LINES

        async for file in client.files.list():
            await client.files.delete(file.id)
        async with httpx.AsyncClient(base_url=address.url) as http:
            headers = {"Content-Type": "multipart/form-data; boundary=b"}
            answer = await http.post("/v1/files", content=unannounced(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "file_too_large")
    assert [key for key in await stored_keys(redis_url) if not key.endswith("held")] == []


PART = '--b\r\nContent-Disposition: form-data; name="{}"\r\n\r\n{}\r\n'
FILE = '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{}\r\n'
WRONG: list[tuple[str, str | None]] = [
    (FILE.format("x") + PART.format("purpose", "assistants") + "--b--\r\n", "purpose"),
    (FILE.format("x") + "--b--\r\n", "purpose"),
    (PART.format("purpose", "batch") + "--b--\r\n", "file"),
    (FILE.format("x") + FILE.format("y") + PART.format("purpose", "batch") + "--b--\r\n", "file"),
    (FILE.format("x") + PART.format("purpose", "batch"), None),
    (FILE.format("x") + PART.format("purpose", "x" * 2000) + "--b--\r\n", "purpose"),
    (FILE.format("x") + PART.format("purpose", "batch") + PART.format("other", "1") + "--b--\r\n", "other"),
    (
        FILE.format("x") + PART.format("purpose", "batch") + PART.format("expires_after[seconds]", "5") + "--b--\r\n",
        "expires_after.anchor",
    ),
    (PART.format("a", "1") * 20 + "--b--\r\n", None),
    ("no boundary", None),
]


async def test_a_form_that_is_wrong_is_refused_by_its_field(http: httpx.AsyncClient, redis_url: str) -> None:
    for body, field in WRONG:
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        answer = await http.post("/v1/files", content=body.encode(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (body, answer.text)
    plain = await http.post("/v1/files", json={"purpose": "batch"})
    assert plain.status_code == 415
    assert [key for key in await stored_keys(redis_url) if not key.endswith("held")] == []


async def test_a_full_redis_takes_no_file(client: openai.AsyncOpenAI, redis_server: EmbeddedRedis) -> None:
    """One can be deleted all the same."""
    made = await client.files.create(file=("a", LINES), purpose="batch")
    ask_all(redis_server, "CONFIG", "SET", "maxmemory", 1)
    try:
        with pytest.raises(openai.RateLimitError, match="memory limit"):
            await client.files.create(file=("a", LINES), purpose="batch")
        assert (await client.files.delete(made.id)).deleted
    finally:
        ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)


async def test_another_tenants_file_does_not_exist(another: Another, redis_url: str, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", {"ours": "ours", "others": "others"})
    async with another(gateway_settings(redis_url, keys=keys)) as address:
        async with client_of(address, "ours") as ours, client_of(address, "others") as others:
            made = await ours.files.create(file=("a", b"x"), purpose="batch")
            calls: list[Any] = [others.files.retrieve, others.files.content, others.files.delete]
            for call in calls:
                with pytest.raises(openai.NotFoundError):
                    await call(made.id)
            assert [file async for file in others.files.list()] == []
            assert (await ours.files.retrieve(made.id)).id == made.id
        async with httpx.AsyncClient(base_url=address.url) as http:
            refused = await http.post("/v1/files", files={"file": b"x"}, data={"purpose": "batch"})
        assert refused.status_code == 401


async def test_an_upload_may_take_longer_than_other_bodies(another: Another, settings: Settings) -> None:
    """It has the time of uploads once its caller is known; a form that never ends is refused after that."""

    async def slowly(end: bytes) -> AsyncIterator[bytes]:
        yield FILE.format("x").encode()
        await asyncio.sleep(1.5)  # how the client is slow
        yield PART.format("purpose", "batch").encode() + end

    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    for limit_s, status in ((30.0, 200), (0.2, 408)):
        patient = replace(
            settings,
            connections=ConnectionSettings(body_timeout_s=1.0),
            batches=BatchSettings(upload_timeout_s=limit_s),
        )
        async with another(patient) as address, httpx.AsyncClient(base_url=address.url) as http:
            answer = await http.post("/v1/files", content=slowly(b"--b--\r\n"), headers=headers)
        assert answer.status_code == status


async def test_slow_uploads_of_one_tenant_leave_room_for_others(
    another: Another, settings: Settings, tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys", {"a": "a", "b": "b"})
    guarded = replace(settings, gateway=replace(settings.gateway, api_keys=keys), batches=BatchSettings(max_uploads=4))
    have_begun, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield FILE.format("x").encode()
        have_begun.release()
        await may_end.wait()
        yield PART.format("purpose", "batch").encode() + b"--b--\r\n"

    headers = {"Content-Type": "multipart/form-data; boundary=b", "Authorization": "Bearer a"}
    async with another(guarded) as address, httpx.AsyncClient(base_url=address.url) as http:
        slow = [asyncio.create_task(http.post("/v1/files", content=slowly(), headers=headers)) for _ in range(3)]
        for _ in slow:
            await have_begun.acquire()

        async def is_refused() -> bool:
            async with client_of(address, "a") as ours:
                try:
                    await ours.files.create(file=("a", b"x"), purpose="batch")
                except openai.RateLimitError as error:
                    return "of this tenant" in str(error)
            return False

        await eventually(is_refused)
        async with client_of(address, "b") as others:
            assert await others.files.create(file=("a", b"x"), purpose="batch")
        may_end.set()
        assert [(await each).status_code for each in slow] == [200] * 3
        async with client_of(address, "a") as ours:
            assert await ours.files.create(file=("a", b"x"), purpose="batch")
