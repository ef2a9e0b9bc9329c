"""What commands that run once have in common: a client, polling, and errors as an exit status."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

from pagestream_operator.errors import ApiUnavailable, OperatorError
from pagestream_operator.kube.client import KubeClient

POLL_S = 0.5
_REQUEST_S = 10.0


def run_once(act: Callable[[KubeClient], Awaitable[object]]) -> None:
    """Run `act` with a client. An error of the operator ends the process with status 1 and the error's text."""

    async def run() -> None:
        async with KubeClient(_REQUEST_S) as client:
            await act(client)

    try:
        asyncio.run(run())
    except OperatorError as error:
        sys.exit(f"pagestream-operator: {error}")


async def wait_until(condition: Callable[[], Awaitable[bool]], *, limit_s: float) -> bool:
    """Ask every `POLL_S` until the condition holds. Returns False when it doesn't hold at the limit.

    Raises:
        ApiUnavailable: the API server did not answer the last time.
    """
    end = time.monotonic() + limit_s
    while True:
        try:
            if await condition():
                return True
            if time.monotonic() > end:
                return False
        except ApiUnavailable as error:
            if time.monotonic() > end:
                raise
            report(f"asking again: {error}")
        await asyncio.sleep(POLL_S)


def report(text: str) -> None:
    """Write a line to the Job's log."""
    sys.stderr.write(f"pagestream-operator: {text}\n")
    sys.stderr.flush()
