"""Where grpc.aio and gRPC's blocking API differ: a pair of each, of which `async_client.py` uses the first and
`client.py`, which is generated from it, the second."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc

sleep_async, sleep = asyncio.sleep, time.sleep


class AsyncClosing:
    """Whether something is closed, and a pause that ends then; in one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Close it."""
        self._event.set()

    def is_set(self) -> bool:
        """Whether it is closed."""
        return self._event.is_set()

    async def wait(self, seconds: float) -> None:
        """Pause until it is closed, at most for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()


Closing = threading.Event
"""The same for threads."""


def connect_async(
    target: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, int]]
) -> grpc.aio.Channel:
    """Return a channel of grpc.aio; without TLS where there are no credentials."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def connect(
    target: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, int]]
) -> grpc.Channel:
    """Return a channel of the blocking API; without TLS where there are no credentials."""
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


async def read_async(call: Any) -> Any:
    """Return the next message of a stream; None at its end."""
    message = await call.read()
    return None if message is grpc.aio.EOF else message


def read(call: Any) -> Any:
    """Return the next message of a stream; None at its end."""
    return next(call, None)


async def await_status_async(call: Any, limit_s: float) -> None:
    """Wait for the status of a stream whose last message has come; how its connection ends changes nothing."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            await call.code()


def await_status(call: Any, limit_s: float) -> None:
    """Wait for the status of a stream whose last message has come; how its connection ends changes nothing."""
    with suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
        call.exception(limit_s)


def is_call_cancelled(error: BaseException) -> bool:
    """Whether an error says that a call of grpc.aio was cancelled, and not the task that waits for it."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    task = asyncio.current_task()
    return task is None or task.cancelling() == 0
