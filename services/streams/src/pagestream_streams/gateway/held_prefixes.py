"""Which engine has computed which beginnings of prompts, as far as a gateway knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from pagestream_streams.protocol.keys import Prefix

MOST_HOLDERS = 16
"""Engines that are remembered for each beginning, the last ones: a prompt that is a fifth of all has 13 of 64."""


class HeldPrefixes:
    """The digests of beginnings with the engines that have computed them, least recently used out first.

    An engine may have evicted what stands here, or hold what doesn't: that costs a cached prefix and nothing else.
    """

    def __init__(self, most: int) -> None:
        """`most`: digests that are kept; docs/benchmarks/placement.md says what they take."""
        self._most = most
        self._engines: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._expected: dict[bytes, str] = {}
        """Where the last request with a beginning was placed, until any engine says that it has computed it."""

    def __len__(self) -> int:
        """Return how many digests are known."""
        return len(self._engines)

    def expect(self, digests: Iterable[bytes], engine: str) -> None:
        """Note that a request with these beginnings was placed where an engine is expected to take it."""
        for digest in digests:
            self._touch(digest)
            self._expected[digest] = engine
        self._forget()

    def note(self, digests: Iterable[bytes], engine: str) -> None:
        """Note that an engine has taken a request with these beginnings, whichever was expected to."""
        for digest in digests:
            engines = self._touch(digest)
            if engine not in engines:
                self._engines[digest] = (*engines, engine)[-MOST_HOLDERS:]
            self._expected.pop(digest, None)
        self._forget()

    def _touch(self, digest: bytes) -> tuple[str, ...]:
        engines = self._engines.setdefault(digest, ())
        self._engines.move_to_end(digest)
        return engines

    def _forget(self) -> None:
        while len(self._engines) > self._most:
            digest, _ = self._engines.popitem(last=False)
            self._expected.pop(digest, None)

    def lengths(self, prefixes: Sequence[Prefix], among: Collection[str]) -> dict[str, int]:
        """Return for each of the living engines that holds any of a prompt's beginnings how many tokens it holds."""
        found: dict[str, int] = {}
        for num_tokens, digest in prefixes:
            engines = self._engines.get(digest)
            if engines is None:
                break
            found.update((engine, num_tokens) for engine in engines if engine in among)
            expected = self._expected.get(digest)
            if expected is not None and expected in among:
                found[expected] = num_tokens
        return found
