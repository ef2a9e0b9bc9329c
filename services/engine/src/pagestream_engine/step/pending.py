"""A step that was launched and may still run."""

from __future__ import annotations

from collections.abc import Callable

from pagestream_engine.step.records import StepResult

PendingResult = Callable[[], StepResult]
"""Waits for a launched step, and returns its result or raises what failed it. It may be called once."""


def raising(error: BaseException) -> PendingResult:
    """Return a pending result that raises."""

    def result() -> StepResult:
        raise error

    return result
