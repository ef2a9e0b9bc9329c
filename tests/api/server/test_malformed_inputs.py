"""Malformed inputs over HTTP, WebSocket and gRPC: a small sample of what `make deep PARTS=malformed` sends."""

import asyncio
import logging

import httpx
import pytest
from campaigns.malformed_inputs.batches import Outcome
from campaigns.malformed_inputs.inputs import Inputs, Sender
from campaigns.malformed_inputs.process import unfinished_requests
from support.clients.gateway_clients import Address
from support.engines.synthetic_engine import MODEL
from support.protocol.token_streams import eventually

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

COUNT = 500
SEED = 20
LATE_TASKS = 16
"""Tasks of gateway and engine that begin after the first look; each input has at least one."""


async def test_malformed_inputs_are_refused_and_leave_nothing_behind(
    gateway: Address, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        document = (await client.get("/openapi.json")).json()
    before = len(asyncio.all_tasks())
    sender = Sender(Inputs(document, MODEL, SEED), gateway.http_port, gateway.grpc_port, connections=32)
    await sender.send(COUNT)
    assert not sender.failures
    counts = sender.tally
    assert counts.num_inputs >= COUNT
    assert counts.count(Outcome.FAILED) == 0
    assert counts.count(Outcome.REFUSED) > COUNT / 2
    assert counts.count(Outcome.ACCEPTED) > 0
    assert {"HTTP: bodies", "HTTP: chunks", "WebSocket: frames", "gRPC: frames", "gRPC: messages"} <= set(counts.counts)
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]

    async def is_calm() -> bool:
        return len(asyncio.all_tasks()) <= before + LATE_TASKS and not await unfinished_requests(redis_url)

    await eventually(is_calm)
