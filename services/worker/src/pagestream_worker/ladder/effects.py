"""What each rung means for the parts of an engine."""

from __future__ import annotations

from typing import NamedTuple

from pagestream_worker.ladder.ladder import Rung


class Effects(NamedTuple):
    """What is in force at a rung."""

    claims_ahead: bool
    """Whether prompts are claimed while others are being computed."""
    keeps_cache: bool
    """Whether evicted blocks are saved to host memory, and acknowledged log entries are kept in memory."""
    lowers_batch: bool
    greatest_class: int | None
    """Of the new requests that are claimed; None: all."""
    refused_class: int | None
    """The least class that gateways are asked to refuse; None: none."""


def effects_at(rung: Rung) -> Effects:
    """Return the effects of a rung, with those of the rungs below it."""
    greatest = 0 if rung >= Rung.LEAVE_CLASS_1 else 1 if rung >= Rung.LEAVE_CLASS_2 else None
    refused = 1 if rung >= Rung.REFUSE_CLASS_1 else 2 if rung >= Rung.REFUSE_CLASS_2 else None
    return Effects(
        claims_ahead=rung < Rung.NO_PREFETCH,
        keeps_cache=rung < Rung.SMALL_CACHE,
        lowers_batch=rung >= Rung.SMALL_BATCH,
        greatest_class=greatest,
        refused_class=refused,
    )


def lowered_batch(max_num_seqs: int, num_running: int) -> int:
    """Return how many sequences may run at once on a lowered batch.

    Those that run go on to their end: three quarters of them is what the engine comes down to. Half of the limit where
    nothing runs.
    """
    least = max_num_seqs // 2
    return max(1, min(least, num_running * 3 // 4) if num_running else least)
