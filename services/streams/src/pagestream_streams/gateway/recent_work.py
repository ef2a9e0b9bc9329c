"""What a gateway has given to each engine lately."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection

WINDOW_S = 30.0
AHEAD = 16
"""Requests by which an engine may be ahead of the others in any case: few requests are no load."""


class RecentWork:
    """Requests placed in the last WINDOW_S seconds, and the tokens that their engines had to compute for them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: returns seconds."""
        self.tokens: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self._clock = clock
        self._last: deque[tuple[float, str, int, int]] = deque()

    def add(self, engine: str, num_tokens: int, requests: int = 1) -> None:
        """Note a request of which an engine has to compute `num_tokens`; both negative: one that was refused."""
        self._last.append((self._clock(), engine, num_tokens, requests))
        self.tokens[engine] += num_tokens
        self.requests[engine] += requests

    def mean_tokens(self, num_tokens: int) -> float:
        """Return what a request's engine has to compute on average, one of `num_tokens` among them."""
        return (self.tokens.total() + num_tokens) / (self.requests.total() + 1)

    def with_room(self, engines: Collection[str], most: float) -> list[str]:
        """Return the engines with at most `most` times what the others have on average, and some more; never none."""
        since = self._clock() - WINDOW_S
        while self._last and self._last[0][0] < since:
            _, oldest, num_tokens, requests_of = self._last.popleft()
            self.tokens[oldest] -= num_tokens
            self.requests[oldest] -= requests_of
        tokens, requests = (sum(each[engine] for engine in engines) for each in (self.tokens, self.requests))
        part = most / (len(engines) - 1 + most)  # of the sum: with two engines most : 1
        more = AHEAD * tokens / max(1, requests)
        found = [
            each
            for each in engines
            if self.tokens[each] <= part * tokens + more and self.requests[each] <= part * requests + AHEAD
        ]
        return found or list(engines)
