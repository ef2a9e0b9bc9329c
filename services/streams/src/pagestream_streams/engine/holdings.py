"""What an engine believes to own, and how that is compared with what Redis shows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

Fence = tuple[int | str, str]

_ANY_CLAIM: Fence = ("", "")


@dataclass
class Alone:
    """The request that an engine runs with nothing beside it, until its log is longer than `index`."""

    request_id: str
    index: int
    passed: bool = False


class Holdings:
    """Request ids with the (epoch, nonce) of their claims."""

    def __init__(self) -> None:
        """Empty."""
        self._held: dict[str, tuple[int, str]] = {}
        self._claiming: set[object] = set()
        self._suspects: dict[str, frozenset[object]] = {}

    def __iter__(self) -> Iterator[str]:
        """The ids."""
        return iter(list(self._held))

    def __contains__(self, request_id: object) -> bool:
        """Whether it is held."""
        return request_id in self._held

    def __len__(self) -> int:
        """How many they are."""
        return len(self._held)

    def add(self, request_id: str, epoch: int, nonce: str) -> None:
        """A claim has come."""
        self._held[request_id] = (epoch, nonce)

    def drop(self, request_ids: Collection[str]) -> None:
        """They are finished, lost or handed back."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def fence(self, request_id: str) -> Fence:
        """The claim's (epoch, nonce); ("", "") where it isn't held, which scripts take as whatever claim it is."""
        return self._held.get(request_id, _ANY_CLAIM)

    def snapshot(self) -> Mapping[str, tuple[int, str]]:
        """A copy, to be taken before Redis is asked."""
        return dict(self._held)

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """While a claim is on its way, Redis may show requests that we can't know yet."""
        token = object()
        self._claiming.add(token)
        try:
            yield
        finally:
            self._claiming.discard(token)

    def lost(self, before: Mapping[str, tuple[int, str]], owned: Collection[str]) -> list[str]:
        """What was held before Redis was asked, is held still by the same claim, and was not in its answer."""
        return [
            request_id
            for request_id, fence in before.items()
            if request_id not in owned and self._held.get(request_id) == fence
        ]

    def unknown(self, owned: Collection[str]) -> list[str]:
        """What Redis shows twice in a row as ours although no claim that was on its way at the first time can still
        bring it.

        Called once for each answer of Redis.
        """
        suspects = {request_id: self._suspects.get(request_id) for request_id in owned if request_id not in self._held}
        result = [
            request_id for request_id, claims in suspects.items() if claims is not None and not claims & self._claiming
        ]
        now = frozenset(self._claiming)
        self._suspects = {request_id: now if claims is None else claims for request_id, claims in suspects.items()}
        return result
