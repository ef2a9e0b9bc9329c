"""Appends of plain tokens to many logs of one partition, as the bytes that go to Redis and to the gateways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from pagestream_streams.protocol.records import Append, AppendOutcome

_HEAD, _WIDTH = 7, 6
"""Values of a request before its entries, and of an entry: append.lua's."""


@dataclass(frozen=True, slots=True)
class TokenAppends:
    """One append for each of `count` requests: tokens without logprobs that follow others of the same claim."""

    partition: int
    """Number of their partition, which their request ids name."""
    count: int
    values: bytes
    """append.lua's ARGV[2]."""
    wake_ups: bytes
    """For each append a WakeUp of its slice, one after another."""
    wake_ends: Sequence[int]
    """Where each one ends in `wake_ups`."""

    def wake_up(self, place: int) -> bytes:
        """Return the WakeUp of an append. Concatenated ones are one with all slices."""
        return self.wake_ups[self.wake_ends[place - 1] if place else 0 : self.wake_ends[place]]

    def appends(self) -> list[Append]:
        """Return the appends as records, which cost more than all the rest."""
        values, at, appends = orjson.loads(self.values), 0, []
        while at < len(values):
            request_id, epoch, nonce, first_index, _, count, _ = values[at : at + _HEAD]
            at += _HEAD
            entries = [tuple(values[place : place + _WIDTH]) for place in range(at, at + count * _WIDTH, _WIDTH)]
            at += count * _WIDTH
            appends.append(Append(request_id, int(epoch), nonce, first_index, entries))
        return appends


@dataclass(frozen=True, slots=True)
class TokenOutcomes:
    """What became of `TokenAppends`."""

    next_indexes: Sequence[int]
    """Entries in each log."""
    others: Mapping[int, tuple[Append, AppendOutcome]]
    """By place, the appends whose outcome is not OK, with it."""
