"""How long an engine keeps its model for the requests that it has begun, whatever waits for other models."""

from collections.abc import Collection

MOST_TURNS = 16
"""Longest turn, in `max_serve_s`."""


class Turns:
    """The turns in which an engine serves its models, one after the other.

    A change throws away what is computed of a prompt. So the engine owes each sequence that it claims in the first
    `min_serve_s` of a turn its first token, and as much time again as that has taken, up to `min_serve_s`. It waits for
    first tokens for at most `max_serve_s`. Where that ended a turn, the model's next one gets twice as long, up to
    `MOST_TURNS` times `max_serve_s`, and those after it, as long as they need more than `max_serve_s`: the first token
    of a long prompt comes at last, and no search of hours keeps the other models waiting for longer and longer.

    Args:
        min_serve_s: seconds that each turn lasts at least.
        max_serve_s: seconds after which a turn owes no first token.
    """

    def __init__(self, min_serve_s: float, max_serve_s: float) -> None:
        self._min_s = min_serve_s
        self._max_s = max(min_serve_s, max_serve_s)
        self._longer_s: dict[str, float] = {}  # by model, where max_serve_s was not enough
        self._model = ""
        self._began_s = self._until_s = 0.0
        self._claimed_s: dict[str, float] = {}  # when a sequence without a token was first seen
        self._is_first_look = True

    def begin(self, model: str, now_s: float) -> None:
        """Begin a turn, in which nothing is claimed yet."""
        lasted_s = now_s - self._began_s
        if self._claimed_s and lasted_s >= self._limit_s:
            self._longer_s[self._model] = min(2 * self._limit_s, MOST_TURNS * self._max_s)
        elif lasted_s <= self._max_s:
            self._longer_s.pop(self._model, None)
        self._model = model
        self._began_s = self._until_s = now_s
        self._claimed_s = {}
        self._is_first_look = True

    def owes(self, prefilling: Collection[str], now_s: float) -> bool:
        """Return whether the model is to stay. To be called about once a second.

        Args:
            prefilling: ids of the claimed sequences that have no token yet.
        """
        if self._is_first_look or now_s - self._began_s <= self._min_s:
            for each in prefilling:
                self._claimed_s.setdefault(each, now_s)
        self._is_first_look = False
        for gone in self._claimed_s.keys() - set(prefilling):
            took_s = now_s - self._claimed_s.pop(gone)
            self._until_s = max(self._until_s, now_s + min(took_s, self._min_s))
        is_awaited = bool(self._claimed_s) and now_s - self._began_s < self._limit_s
        return is_awaited or now_s < self._until_s

    @property
    def _limit_s(self) -> float:
        return self._longer_s.get(self._model, self._max_s)
