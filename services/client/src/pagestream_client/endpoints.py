"""The gateways that a client knows, and which of them it calls."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence


class Endpoints:
    """Choose the gateway of the next call; all streams of a client share it. Safe to use from several threads.

    A client stays with a gateway that works. The first one is drawn at random, so that many clients spread over the
    gateways.

    Args:
        targets: addresses of the gateways; a repeated one counts once.

    Raises:
        ValueError: there is no target.
    """

    def __init__(self, targets: Sequence[str], rng: random.Random) -> None:
        if not targets:
            raise ValueError("at least one gateway is needed, none was given")
        self.targets = tuple(dict.fromkeys(targets))
        self._lock = threading.Lock()
        self._failed = dict.fromkeys(self.targets, 0)  # number of the failure, counted over all targets; 0: it works
        self._num_failures = 0
        self._current = rng.choice(self.targets)

    @property
    def current(self) -> str:
        """The gateway of the next call."""
        return self._current

    def worked(self, target: str) -> None:
        """Note that a gateway answered."""
        if self._failed[target]:
            with self._lock:
                self._failed[target] = 0

    def failed(self, target: str) -> None:
        """Note that a gateway did not answer, or is stopping; the one whose last failure is the longest ago is next."""
        with self._lock:
            self._num_failures += 1
            self._failed[target] = self._num_failures
            if target == self._current:
                self._current = min(self.targets, key=self._failed.__getitem__)
