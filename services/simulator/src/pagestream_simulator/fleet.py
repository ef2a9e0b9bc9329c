"""Simulates engines that share a queue, on virtual time.

The model follows the real components event by event:

- The queue has partitions and is first come, first served over all of them; requests that were handed back go first.
- An engine owns a partition by the highest hash and claims from it immediately; an entry that its owner has left for
  `StreamsSettings.steal_after_ms` may be claimed by any engine.
- An engine claims as the worker does: a request of any size when it holds none; otherwise what fits into its free
  blocks beside the blocks it has promised, until it holds as many uncomputed tokens as one step takes.
- It schedules as the engine does: one token budget for decodes, then for prompt chunks by arrival. Blocks are allocated
  as sequences grow; when they run out, the latest sequence is preempted and recomputed.
- A drained engine finishes its running step and hands everything back; computed KV blocks are lost.

Not simulated: prefix hits (all prompts differ), the latency of Redis and of gateways, engine failures.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pagestream_engine.errors import CompilerNotFound, NativeBuildError
from pagestream_engine.native_build import NativeLibrary, cached
from pagestream_engine.scheduler.admission import RESERVE_SHARE
from pagestream_streams.engine.claim import SLACK_MS
from pagestream_streams.settings import StreamsSettings

from pagestream_simulator.errors import CompilerMissingError
from pagestream_simulator.load import Load, expected_outputs
from pagestream_simulator.profile import EngineProfile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

_COSTS = ("fixed_s", "prefill_token_s", "prefill_pair_s", "decode_s", "decode_context_s")
_LIMITS = ("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "claim_tokens")


class _Profile(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in _COSTS),
        *((name, ctypes.c_int64) for name in (*_LIMITS, "reserve_share")),
    )


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine now; `prompt_tokens` and what follows are totals since it was added."""

    kv_used_blocks: float
    running: float
    waiting: float
    """Claimed requests that do not run."""
    prompt_tokens: float
    generated_tokens: float
    preemptions: float
    busy_s: float
    gone_s: float
    """Time at which it had drained; infinity before."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """The queue now."""

    depth: float
    tokens: float
    """Prompt tokens of queued requests."""
    oldest_s: float
    """Time at which the oldest request was queued; infinity when the queue is empty."""
    running: float
    """Requests that engines own."""
    claimed_tokens: float
    """Prompt tokens of all first claims so far."""
    expected_output: float
    """Output tokens that are expected of queued requests; begun ones count nothing."""


class Fleet:
    """A queue with its arrivals, and engines that are added and drained: a context manager."""

    def __init__(self, load: Load, profile: EngineProfile, *, partitions: int, seed: int = 0) -> None:
        self._library = _declared(load_library())
        self.first_s: Floats = np.full(len(load), np.inf)
        """Time of each request's first token; infinity before."""
        self.end_s: Floats = np.full(len(load), np.inf)
        """Time of each request's last token; infinity before."""
        self.profile = profile
        limits = (getattr(profile, name) for name in _LIMITS)
        costs = (getattr(profile.cost, name) for name in _COSTS)
        native = _Profile(*costs, *limits, RESERVE_SHARE)
        self._state = (ctypes.c_double * 8)()
        self._queue = (ctypes.c_double * 6)()
        self._load = load
        self._expected = expected_outputs(load)
        self._handle: int | None = self._library.fleet_new(
            ctypes.byref(native),
            len(load),
            *(
                _pointer(column)
                for column in (
                    load.arrival_s,
                    load.prompt_tokens,
                    load.output_tokens,
                    load.partition,
                    self._expected,
                )
            ),
            partitions,
            StreamsSettings().steal_after_ms / 1000,
            SLACK_MS / 1000,
            seed,
            _pointer(self.first_s),
            _pointer(self.end_s),
        )

    def __enter__(self) -> Self:
        """Return this fleet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Free the memory that C++ holds."""
        if self._handle is not None:
            self._library.fleet_free(self._handle)
            self._handle = None

    def add_engine(self, ready_s: float) -> int:
        """Add an engine that is ready at `ready_s` (now, if that has passed). Returns its number."""
        return int(self._library.fleet_add_engine(self._handle, ready_s))

    def drain(self, engine: int) -> None:
        """Have an engine hand back its requests and end. An engine that isn't ready yet never becomes ready."""
        self._library.fleet_drain(self._handle, engine)

    def advance(self, until_s: float) -> bool:
        """Simulate up to `until_s`. Returns whether all requests are complete."""
        return bool(self._library.fleet_advance(self._handle, until_s))

    def engine(self, number: int) -> EngineState:
        """Return the state of the engine with this number."""
        self._library.fleet_stats(self._handle, number, self._state)
        return EngineState(*self._state)

    def queue(self) -> QueueState:
        """Return the state of the queue."""
        self._library.fleet_queue(self._handle, self._queue)
        return QueueState(*self._queue)

    def first_tokens(self, start: int) -> Ints:
        """Return the requests that got their first token, in that order, without the first `start` of them."""
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
            (pointer, ctypes.c_int64, *[pointer] * 5, number, real, real, ctypes.c_uint64, pointer, pointer),
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


_LIBRARY = NativeLibrary("fleet", Path(__file__).parent / "fleet.cpp", ("-O2", "-std=c++17", "-shared", "-fPIC"))


@cache
def load_library() -> ctypes.CDLL:
    """Load the compiled fleet.

    Raises:
        CompilerMissingError: there is no C++ compiler, or it failed.
    """
    try:
        return ctypes.CDLL(str(cached(_LIBRARY)))
    except CompilerNotFound as error:
        raise CompilerMissingError(
            "simulate needs a C++ compiler", hint="install g++ or clang++, or set CXX to the path of one"
        ) from error
    except (OSError, NativeBuildError) as error:
        raise CompilerMissingError(f"the simulation can't be compiled: {error}") from error
