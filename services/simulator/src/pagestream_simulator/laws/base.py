"""What a law is to the simulation."""

from __future__ import annotations

from typing import Protocol

from pagestream_scaling import PoolObservation


class Law(Protocol):
    """Says every `period_s` how many pods there should be. It has a state of its own: one object for each run."""

    @property
    def period_s(self) -> float:
        """Seconds between two decisions."""
        ...

    def initial(self, usual: int) -> int:
        """How many pods are ready when the trace begins; `usual` is what the terms say."""
        ...

    def desired(self, observation: PoolObservation) -> int:
        """How many pods there should be."""
        ...
