"""When a part that died is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Delays between a death and the next start."""

    first_delay_s: float = 0.5
    """Before the second restart in a row; the first one is immediate, since most deaths are single."""
    max_delay_s: float = 30.0
    """The delay doubles up to here: a broken part must not eat the machine."""
    stable_s: float = 20.0
    """A part that lived as long as this starts with a clean record."""
    hopeless_starts: int = 3
    """So many exits in a row before it was ever ready mean that it cannot start."""
    refusal_code: int = 2
    """One exit with this code before it was ever ready means the same: our programs and argparse end with it where
    their options, or what those name, are wrong.
    """


@dataclass(frozen=True)
class Death:
    """How a part's process ended."""

    lived_s: float
    was_ready: bool
    """Whether it had been ready since this start."""
    exit_code: int
    """Negative: the signal that killed it."""

    @property
    def by_itself(self) -> bool:
        """It gave up, nobody killed it."""
        return self.exit_code >= 0


class RestartRecord:
    """Deaths of one part, and what follows from them."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._deaths_in_row = 0
        self._failed_starts = 0
        self._ever_ready = False
        self._refused = False

    def add(self, death: Death) -> float:
        """Seconds until the next start."""
        if death.lived_s >= self._policy.stable_s:
            self._deaths_in_row = 0
        self._ever_ready = self._ever_ready or death.was_ready
        self._failed_starts = self._failed_starts + 1 if death.by_itself and not death.was_ready else 0
        self._refused = not self._ever_ready and death.exit_code == self._policy.refusal_code
        self._deaths_in_row += 1
        return self._delay()

    @property
    def refused(self) -> bool:
        """It never ran, and said with its exit code that its options are wrong."""
        return self._refused

    @property
    def hopeless(self) -> bool:
        """It never ran, and refused its options or gave up by itself again and again: the cause is in how it was
        started.
        """
        failed = not self._ever_ready and self._failed_starts >= self._policy.hopeless_starts
        return failed or self._refused

    def _delay(self) -> float:
        if self._deaths_in_row == 1:
            return 0.0
        doublings = min(self._deaths_in_row - 2, 32)
        return float(min(self._policy.first_delay_s * 2**doublings, self._policy.max_delay_s))
