"""The gateways that a client knows, and which of them it uses."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Sequence

_TARGET = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}")


class Endpoints:
    """Remembers which gateways failed; all streams of a client share it. Safe to use from several threads.

    A client stays with a gateway that works. Where it begins is chance, so that many clients share the gateways.
    """

    def __init__(self, targets: Sequence[str], rng: random.Random) -> None:
        """ValueError unless each target is "host:port" and there is at least one."""
        if not targets:
            raise ValueError("at least one gateway is needed, as 'host:port'")
        for target in targets:
            if not _TARGET.fullmatch(target):
                raise ValueError(f"a gateway is given as 'host:port' (or '[address]:port'), got {target!r}")
        self.targets = tuple(dict.fromkeys(targets))
        self._lock = threading.Lock()
        self._failed = dict.fromkeys(self.targets, 0)  # number of the failure, counted over all targets; 0: it works
        self._num_failures = 0
        self._current = rng.choice(self.targets)

    @property
    def current(self) -> str:
        """The gateway to ask now."""
        return self._current

    def worked(self, target: str) -> None:
        """It answered."""
        if self._failed[target]:
            with self._lock:
                self._failed[target] = 0

    def failed(self, target: str) -> None:
        """It did not answer, or is about to end: next is the one whose last failure is the longest ago."""
        with self._lock:
            self._num_failures += 1
            self._failed[target] = self._num_failures
            if target == self._current:
                self._current = min(self.targets, key=self._failed.__getitem__)
