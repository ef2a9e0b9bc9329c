"""The requests that an engine holds, and how they are compared with those that Redis shows as its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from pagestream_streams.protocol.records import Append, AppendKind, AppendOutcome

Fence = tuple[int | str, str]
"""Epoch and nonce of a claim, by which scripts refuse what comes from an earlier one."""

_ANY_CLAIM: Fence = ("", "")


class ActiveRequests:
    """Ids of claimed requests with the fences of their claims."""

    def __init__(self) -> None:
        """Create it empty."""
        self._fences: dict[str, tuple[int, str]] = {}
        self._claims_in_flight: set[object] = set()
        self._unexpected: dict[str, frozenset[object]] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over a copy of the ids."""
        return iter(list(self._fences))

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request is held."""
        return request_id in self._fences

    def __len__(self) -> int:
        """Return the number of requests held."""
        return len(self._fences)

    def add(self, request_id: str, epoch: int, nonce: str) -> None:
        """Hold a claimed request; a later claim of the same request replaces the fence."""
        self._fences[request_id] = (epoch, nonce)

    def drop(self, request_ids: Collection[str]) -> None:
        """Stop holding requests that are finished, lost or handed back."""
        for request_id in request_ids:
            self._fences.pop(request_id, None)

    def settle(self, append: Append, outcome: AppendOutcome) -> bool:
        """Drop the request of an append that ended it or showed it as lost; return whether it did.

        A request that was claimed again since stays held.
        """
        finished = outcome.kind is AppendKind.OK and append.ends
        is_over = finished or outcome.lost
        if is_over and self.fence(append.request_id) == (append.epoch, append.nonce):
            self.drop([append.request_id])
        return is_over

    def fence(self, request_id: str) -> Fence:
        """Return a request's fence; ("", "") where it isn't held, which scripts match with any claim of this engine."""
        return self._fences.get(request_id, _ANY_CLAIM)

    def snapshot(self) -> Mapping[str, tuple[int, str]]:
        """Copy the fences. Take it before Redis is asked, see `lost`."""
        return dict(self._fences)

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """Mark a claim as in flight: until its reply, Redis may show requests that are not held yet."""
        token = object()
        self._claims_in_flight.add(token)
        try:
            yield
        finally:
            self._claims_in_flight.discard(token)

    def lost(self, before: Mapping[str, tuple[int, str]], owned: Collection[str]) -> list[str]:
        """Return the requests that Redis no longer shows as this engine's.

        `before` is the snapshot from before Redis was asked, `owned` its answer. What was claimed (again) in between is
        left out.
        """
        return [
            request_id
            for request_id, fence in before.items()
            if request_id not in owned and self._fences.get(request_id) == fence
        ]

    def unclaimed(self, owned: Collection[str]) -> list[str]:
        """Return the requests in `owned` that no claim brought: the reply was lost.

        Call it once for each answer of Redis. A request counts when two answers in a row show it and no claim that was
        in flight at the first one still is.
        """
        unexpected = {each: self._unexpected.get(each) for each in owned if each not in self._fences}
        result = [
            request_id
            for request_id, claims in unexpected.items()
            if claims is not None and not claims & self._claims_in_flight
        ]
        now = frozenset(self._claims_in_flight)
        self._unexpected = {each: now if claims is None else claims for each, claims in unexpected.items()}
        return result
