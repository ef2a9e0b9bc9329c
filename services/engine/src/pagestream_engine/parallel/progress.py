"""How a rank counts what it has done: what its device has done, not what was queued for it.

On a GPU a collective returns when it is queued, long before another rank's data has come. A count that ended there
would show a rank that computes where one hangs in an exchange, and `Stragglers` would name none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from queue import SimpleQueue
from time import sleep
from typing import Protocol

import torch

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.parallel.rank import OwnRank, Progress

POLL_S = 0.05
"""Between two looks at what a GPU has done: a rank that hangs is named after seconds."""


class RankProgress(Protocol):
    """The count of this process' rank."""

    def advance(self) -> None:
        """Count one more layer."""
        ...

    def collective(self) -> AbstractContextManager[None]:
        """Count the block as a collective that the rank takes part in."""
        ...


class HostProgress:
    """Of a rank whose operations are done when they return: on a CPU."""

    def __init__(self, progress: Progress, rank: int) -> None:
        self._progress, self._rank = progress, rank

    def advance(self) -> None:
        self._progress.advance(self._rank)

    def collective(self) -> AbstractContextManager[None]:
        return self._progress.collective(self._rank)


class Mark(Protocol):
    """A place in a stream of operations: `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...


class _Kind(Enum):
    LAYER = auto()
    BEGUN = auto()
    ENDED = auto()


class StreamProgress:
    """Of a rank whose operations are queued on a GPU: marks go between them, and a thread counts those that the GPU has
    passed.

    Args:
        mark: puts a mark behind what is queued so far.
        prepare_thread: called first on the thread that looks at the marks.
    """

    def __init__(
        self, progress: Progress, rank: int, mark: Callable[[], Mark], prepare_thread: Callable[[], None]
    ) -> None:
        self._progress, self._rank = progress, rank
        self._mark = mark
        self._prepare_thread = prepare_thread
        self._marks: SimpleQueue[tuple[_Kind, Mark]] = SimpleQueue()
        threading.Thread(target=self._count, name="progress", daemon=True).start()

    def advance(self) -> None:
        self._put(_Kind.LAYER)

    @contextmanager
    def collective(self) -> Iterator[None]:
        self._put(_Kind.BEGUN)
        yield
        self._put(_Kind.ENDED)

    def _put(self, kind: _Kind) -> None:
        self._marks.put((kind, self._mark()))

    def _count(self) -> None:
        # A thread of CUDA begins with GPU 0, where a context takes half a gigabyte that another rank counts on.
        self._prepare_thread()
        while True:
            kind, mark = self._marks.get()
            while not mark.query():
                sleep(POLL_S)
            match kind:
                case _Kind.LAYER:
                    self._progress.advance(self._rank)
                case _Kind.BEGUN:
                    self._progress.begin(self._rank)
                case _Kind.ENDED:
                    self._progress.end(self._rank)


def open_progress(own: OwnRank, device: torch.device) -> RankProgress | None:
    """Return the count of a rank of a group, one for each process; None for a rank alone."""
    if own.size == 1:
        return None
    if own.folder is None:
        raise InvariantViolation(f"rank {own.index} of {own.size}: given no folder to meet the others in")
    progress = Progress(own.folder, own.size)
    if device.type != "cuda":
        return HostProgress(progress, own.index)
    return StreamProgress(progress, own.index, lambda: _event(device), lambda: torch.cuda.set_device(device))


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
