"""The queue for the tokenizer is bounded; a place comes back once its work is done, also of a client that has left."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import httpx
import pytest
from pagestream_gateway import LimitSettings, Settings
from pagestream_gateway.encoder import Encoded, EncodingCache, EncodingJob, TextEncoder
from support.clients.gateway_clients import Address
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.processes.waiting import LIMIT_S

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 1}
Another = Callable[[Settings], AbstractAsyncContextManager[Address]]


async def test_what_waits_for_the_tokenizer_is_bounded_and_its_places_come_back(
    engine: SyntheticEngine, settings: Settings, another: Another, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = LimitSettings(tokenize_workers=1, tokenize_queue=2)
    async with (
        another(replace(settings, limits=limits)) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
    ):

        def ask() -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(client.post("/v1/completions", json=BODY))

        assert (await ask()).status_code == 200, "the model is loaded"
        gate, encode_batch = threading.Event(), TextEncoder.encode_batch

        def held(encoder: TextEncoder, jobs: Sequence[EncodingJob], cache: EncodingCache) -> list[Encoded]:
            assert gate.wait(LIMIT_S)
            return encode_batch(encoder, jobs, cache)

        monkeypatch.setattr(TextEncoder, "encode_batch", held)
        try:
            done, waiting = await asyncio.wait([ask() for _ in range(3)], return_when=asyncio.FIRST_COMPLETED)
            [refused] = done
            check_refused(await refused)
            leaving, staying = waiting
            leaving.cancel()
            check_refused(await ask())  # its work is still to be done
            assert not staying.done()
        finally:
            gate.set()
        assert (await staying).status_code == 200
        for _ in range(2):
            assert [(await each).status_code for each in [ask(), ask()]] == [200, 200]


def check_refused(answer: httpx.Response) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (429, "overloaded"), error
    assert error["message"] == "too many requests wait for the tokenizer, at most 2"
    assert answer.headers["Retry-After"] == "1"
