"""The parts of a pass. One that fails stops no other, and is tried again by itself."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pagestream_operator.errors import (
    ApiFailure,
    ApiUnavailable,
    Blocked,
    Conflict,
    Gone,
    NotLeading,
    OperatorError,
    Rejected,
)
from pagestream_operator.kube.kinds import Kind
from pagestream_operator.pool.status import Trouble

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_CONFLICT_PAUSE_S = 1.0
"""The longest one after a conflict, which ends when a watch shows the object as it is."""
_LASTING_S = 10.0
"""Seconds after which a failure that might pass is reported."""
_CONFLICTS = 3
"""Conflicts in a row after which the store is taken to be wrong."""
_MESSAGE_CHARACTERS = 2048


@dataclass(slots=True)
class _Failure:
    error: Exception
    mark: str
    since_s: float
    pause_s: float
    next_s: float
    count: int = 1


@dataclass
class Parts:
    """What has failed in the passes over one pool, by part: since when, and when it is tried again.

    What to report comes from what lasts: a refusal at once, anything else after `_LASTING_S`.
    """

    pool: str
    clock: Callable[[], float]
    """Seconds that never go back."""
    suspect: Callable[[Kind], None]
    """Called with a kind of the pool's namespace about which the store seems to be wrong."""
    _failures: dict[str, _Failure] = field(default_factory=dict)

    async def run(self, name: str, act: Callable[[], Awaitable[None]], *kinds: Kind, mark: str = "") -> bool:
        """Run a part, unless it has failed a short while ago. Returns whether it has succeeded.

        Args:
            name: the part's name.
            act: what it does.
            kinds: the kinds of objects that it writes.
            mark: what it tries. Another one is tried at once, but not where the API server is busy.

        Raises:
            NotLeading: this replica has lost leadership.
        """
        failure = self._failures.get(name)
        if failure is not None and self.clock() < failure.next_s:
            is_same = failure.mark == mark or isinstance(failure.error, ApiUnavailable)
            if is_same:
                return False
        try:
            await act()
        except NotLeading:
            raise
        except Exception as error:  # noqa: BLE001 - logged and reported; the other parts go on
            self._fail(name, error, mark, kinds)
            return False
        if self._failures.pop(name, None) is not None:
            logger.info("a part of the pass goes on", extra={"pool": self.pool, "part": name})
        return True

    def forget(self, *names: str) -> None:
        """Forget the failures of parts that aren't needed any more."""
        for name in names:
            self._failures.pop(name, None)

    def forget_all(self, *but: str) -> None:
        """Forget all failures, but those of these parts."""
        self._failures = {name: failure for name, failure in self._failures.items() if name in but}

    def is_lasting(self, name: str) -> bool:
        """Whether a part has failed, and will not succeed soon."""
        failure = self._failures.get(name)
        return failure is not None and self._lasts(failure)

    def trouble(self, *, without: str) -> Trouble | None:
        """The failures that last, but for that of the part `without`; None where there is none."""
        lasting = [failure for name, failure in self._failures.items() if name != without and self._lasts(failure)]
        if not lasting:
            return None
        messages = dict.fromkeys(_message(failure.error) for failure in lasting)
        return Trouble(_reason(lasting[0].error), "; ".join(messages)[:_MESSAGE_CHARACTERS])

    @property
    def result(self) -> str:
        """How the pass went, for metrics: of several failures the one that is a refusal, else the first."""
        results = [_result(failure.error) for failure in self._failures.values()]
        return "refused" if "refused" in results else next(iter(results), "ok")

    def _lasts(self, failure: _Failure) -> bool:
        is_refusal = isinstance(failure.error, Blocked | Rejected) or not isinstance(failure.error, ApiFailure)
        return is_refusal or self.clock() - failure.since_s >= _LASTING_S

    def _fail(self, name: str, error: Exception, mark: str, kinds: tuple[Kind, ...]) -> None:
        now, known = self.clock(), self._failures.get(name)
        if known is None or type(known.error) is not type(error):
            known = _Failure(error, mark, known.since_s if known is not None else now, 0.0, now, 0)
            self._failures[name] = known
        known.error, known.mark, known.count = error, mark, known.count + 1
        longest = _CONFLICT_PAUSE_S if isinstance(error, Conflict) else _LONGEST_PAUSE_S
        known.pause_s = min(longest, max(_FIRST_PAUSE_S, 2 * known.pause_s))
        if isinstance(error, ApiFailure) and error.retry_after_s is not None:
            known.pause_s = max(known.pause_s, min(error.retry_after_s, _LONGEST_PAUSE_S))
        known.next_s = now + known.pause_s * (0.8 + 0.4 * random.random())
        if isinstance(error, Gone) or (isinstance(error, Conflict) and known.count % _CONFLICTS == 0):
            for kind in kinds:
                self.suspect(kind)
        more = {"pool": self.pool, "part": name, "seconds": known.pause_s}
        if isinstance(error, ApiFailure | Blocked):
            level = logging.INFO if isinstance(error, Conflict) else logging.WARNING
            logger.log(level, "a part of the pass is retried: %s", error, extra=more)
        else:
            logger.error("a part of the pass has failed", exc_info=error, extra=more)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, OperatorError) else f"{type(error).__name__}: {error}"


def _reason(error: Exception) -> str:
    if isinstance(error, Blocked | Rejected):
        return type(error).__name__
    return "WriteFailing" if isinstance(error, ApiFailure) else "InternalError"


def _result(error: Exception) -> str:
    if isinstance(error, Blocked | Rejected):
        return "refused"
    if isinstance(error, Conflict):
        return "conflict"
    return "gone" if isinstance(error, Gone) else "error"
