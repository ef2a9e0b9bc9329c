"""A warm spare: an engine process that has started, and joins once its supervisor asks it to."""

import asyncio
import logging
import os
import sys
import time

from pagestream_options.worker import STANDBY_STATES

from pagestream_worker.engine_core import EngineCore

logger = logging.getLogger(__name__)

IMPORTED, LOADED = STANDBY_STATES
"""How far a spare starts: its modules are imported, or its model is loaded too."""
STANDING_BY = "standing by"
"""Message of the log record by which a supervisor knows that a spare waits."""
_READ_BYTES = 64


class StandbyAbandoned(Exception):  # noqa: N818 - reads as what happened
    """Standard input has ended before a line came: its supervisor is gone."""


async def stand_by(core: EngineCore, state: str) -> float:
    """Wait for a line on standard input. A pipe keeps the line until it is read, so that it may be sent at any time.

    Args:
        state: how far the engine has started, for the log.

    Returns:
        The seconds of the wait.

    Raises:
        StandbyAbandoned: standard input has ended.
        EngineCoreError: the engine has.
        OSError: standard input is nothing that can be waited for, such as a file.
    """
    began = time.monotonic()
    asked = asyncio.ensure_future(_read_line(sys.stdin.fileno()))
    ended = asyncio.wrap_future(core.ended)
    ended.add_done_callback(lambda future: future.cancelled() or future.exception())  # it may end after the wait
    logger.info(STANDING_BY, extra={"state": state})
    try:
        done, _ = await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    return time.monotonic() - began


async def _read_line(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    line: asyncio.Future[None] = loop.create_future()

    def read() -> None:
        data = os.read(descriptor, _READ_BYTES)
        if not data and not line.done():
            line.set_exception(StandbyAbandoned("standard input has ended"))
        elif b"\n" in data and not line.done():
            line.set_result(None)

    loop.add_reader(descriptor, read)
    try:
        await line
    finally:
        loop.remove_reader(descriptor)
