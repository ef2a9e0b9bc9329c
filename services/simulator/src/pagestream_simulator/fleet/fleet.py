"""Engines that share a queue, on virtual time.

The model follows the real parts, event by event. The queue has partitions, first come first served in each; handed back
requests go first. An engine owns a partition by the highest hash and claims from it at once; what an owner left for
STEAL_S is anybody's. It claims as the worker does: one request of any size when it holds none, otherwise what its free
blocks hold beside what it has promised, until it holds as many uncomputed tokens as one step takes. It schedules as the
engine does: one token budget for decodes, then chunks of prompts by arrival; blocks are taken as sequences grow, the
latest sequence is preempted when they run out and is computed again. A drained engine ends its running step and hands
everything back; what it had computed is lost.

Left out: prefix hits (every prompt is another one), Redis' and the gateway's milliseconds, deaths.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pagestream_simulator.fleet.native import load_library
from pagestream_simulator.fleet.profile import EngineProfile
from pagestream_simulator.load import Load

STEAL_S = 0.1
"""As the queue's setting steal_after_ms."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


_LIMITS = ("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "claim_tokens")


class _Profile(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("fixed_s", "token_s", "pair_s", "decode_s", "context_s")),
        *((name, ctypes.c_int64) for name in _LIMITS),
    )


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine now; the last ones are totals since it began."""

    kv_used_blocks: float
    running: float
    waiting: float
    """Requests that it has claimed and does not run."""
    prompt_tokens: float
    generated_tokens: float
    preemptions: float
    busy_s: float
    gone_s: float
    """When it had drained; infinity: it has not."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """The queue now."""

    depth: float
    tokens: float
    """Prompt tokens that wait."""
    oldest_s: float
    """Since when the oldest waits; infinity: none does."""
    running: float
    """Requests that engines own."""
    claimed_tokens: float
    """Prompt tokens of all first claims so far."""


class Fleet:
    """A queue with its arrivals, and engines that come and go. Used as `with Fleet(...) as fleet`."""

    def __init__(self, load: Load, profile: EngineProfile, *, partitions: int, seed: int = 0) -> None:
        self._library = _declared(load_library())
        self.first_s: Floats = np.full(len(load), np.inf)
        """When each request had its first token; infinity: not yet."""
        self.end_s: Floats = np.full(len(load), np.inf)
        """And its last."""
        self.profile = profile
        limits = (getattr(profile, name) for name in _LIMITS)
        native = _Profile(*astuple(profile.cost), *limits)
        self._state = (ctypes.c_double * 8)()
        self._queue = (ctypes.c_double * 5)()
        self._load = load
        self._handle: int | None = self._library.fleet_new(
            ctypes.byref(native),
            len(load),
            *(_pointer(column) for column in (load.arrival_s, load.prompt_tokens, load.output_tokens, load.partition)),
            partitions,
            STEAL_S,
            seed,
            _pointer(self.first_s),
            _pointer(self.end_s),
        )

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Frees the memory outside of Python."""
        if self._handle is not None:
            self._library.fleet_free(self._handle)
            self._handle = None

    def add_engine(self, ready_s: float) -> int:
        """An engine that is ready at a time (now, if that has passed). Returns its number."""
        return int(self._library.fleet_add_engine(self._handle, ready_s))

    def drain(self, engine: int) -> None:
        """Has an engine hand back what it holds and end. One that isn't ready yet never will be."""
        self._library.fleet_drain(self._handle, engine)

    def advance(self, until_s: float) -> bool:
        """Everything that happens up to a time. Returns whether all requests are complete."""
        return bool(self._library.fleet_advance(self._handle, until_s))

    def engine(self, number: int) -> EngineState:
        """How an engine is."""
        self._library.fleet_stats(self._handle, number, self._state)
        return EngineState(*self._state)

    def queue(self) -> QueueState:
        """How the queue is."""
        self._library.fleet_queue(self._handle, self._queue)
        return QueueState(*self._queue)

    def firsts(self, start: int) -> Ints:
        """The requests that got their first tokens, in that order, from the `start`th on."""
        count = int(self._library.fleet_num_first(self._handle)) - start
        found: Ints = np.empty(count, dtype=np.int32)
        self._library.fleet_firsts(self._handle, start, _pointer(found))
        return found


def _pointer(values: npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.ctypes.data)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number, real = ctypes.c_void_p, ctypes.c_int32, ctypes.c_double
    arguments: dict[str, tuple[Sequence[Any], Any]] = {
        "fleet_new": (
            (pointer, ctypes.c_int64, *[pointer] * 4, number, real, ctypes.c_uint64, pointer, pointer),
            pointer,
        ),
        "fleet_free": ((pointer,), None),
        "fleet_add_engine": ((pointer, real), number),
        "fleet_drain": ((pointer, number), None),
        "fleet_advance": ((pointer, real), number),
        "fleet_stats": ((pointer, number, pointer), None),
        "fleet_queue": ((pointer, pointer), None),
        "fleet_num_first": ((pointer,), ctypes.c_int64),
        "fleet_firsts": ((pointer, ctypes.c_int64, pointer), None),
    }
    for name, (takes, gives) in arguments.items():
        function = getattr(library, name)
        function.argtypes, function.restype = list(takes), gives
    return library
