"""A standby waits for a line on standard input, and for nothing else."""

import asyncio
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from pagestream_worker.standby import LOADED, StandbyAbandoned, stand_by
from pagestream_worker.stepping.engine_core import EngineCoreError
from pagestream_worker.stepping.engine_thread import EngineThread


def never() -> None:
    raise AssertionError("nothing is loaded here")


@pytest.fixture
def line_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The writing end of a pipe that is standard input."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as stream, os.fdopen(writing, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", stream)
        yield writer.fileno()
        monkeypatch.undo()


async def test_a_line_that_was_sent_early_or_in_parts_ends_the_wait(line_end: int) -> None:
    core = EngineThread(never)  # type: ignore[arg-type]
    os.write(line_end, b"join\n")
    assert await stand_by(core, LOADED) >= 0.0
    waiting = asyncio.create_task(stand_by(core, LOADED))
    os.write(line_end, b"jo")
    await asyncio.sleep(0.02)
    assert not waiting.done()
    os.write(line_end, b"in\n")
    await waiting


async def test_the_end_of_the_input_or_of_the_engine_ends_it_with_an_error(line_end: int) -> None:
    core = EngineThread(never)  # type: ignore[arg-type]
    waiting = asyncio.create_task(stand_by(core, LOADED))
    await asyncio.sleep(0)
    core.ended.set_exception(EngineCoreError("killed"))
    with pytest.raises(EngineCoreError):
        await waiting
    core.ended = Future()
    os.dup2(os.open(os.devnull, os.O_WRONLY), line_end)  # the pipe has no writer now
    with pytest.raises(StandbyAbandoned):
        await stand_by(core, LOADED)
