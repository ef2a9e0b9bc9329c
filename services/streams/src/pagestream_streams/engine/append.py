"""Write what an engine's steps did: the entries of their requests, and which requests are in the running step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from pagestream.v1.records_pb2 import LogSlice

from pagestream_streams import fault_points
from pagestream_streams.connection.connection import Call, WakeUpSender, publish_wake_ups, wake_up_message
from pagestream_streams.engine.claim import Isolation
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import (
    Append,
    AppendKind,
    AppendOutcome,
    Argument,
    TokenAppends,
    TokenOutcomes,
    to_log_entry,
)
from pagestream_streams.scripts import APPEND, MARK

if TYPE_CHECKING:
    from pagestream_streams.engine.session import EngineSession


class Appender:
    """Appends to logs, one script run for each partition, and wakes the gateways that read them."""

    def __init__(self, session: EngineSession, isolation: Isolation) -> None:
        """Create it; nothing is sent yet."""
        self._session = session
        self._isolation = isolation
        self._wake_ups = WakeUpSender(session.connection, session.settings.beat_limit_s)

    async def stop(self) -> None:
        """Cancel wake-ups in flight."""
        await self._wake_ups.stop()

    async def append(self, appends: Sequence[Append]) -> list[AppendOutcome]:
        """Append a step's entries to their logs; see EngineSession.append."""
        places: defaultdict[Partition, list[int]] = defaultdict(list)
        for place, each in enumerate(appends):
            places[self._session.identity.partition_of(each.request_id)].append(place)
        retention_ms = self._session.settings.retention_s * 1000
        channels = self._session.connection.keyspace.wake_ups("")
        # Between a cluster's nodes a message may be held back for 40 ms, behind an earlier one without its TCP ACK.
        is_published_later = self._session.connection.waits_for_durability or self._session.connection.is_cluster
        calls = [
            Call(
                APPEND,
                where.prefix,
                append_arguments(
                    retention_ms,
                    [appends[i] for i in mine],
                    channels=channels,
                    first_slice=None if is_published_later else self._slice_of,
                ),
            )
            for where, mine in places.items()
        ]
        if fault_points.IS_ON:
            fault_points.before_append(appends)
        replies = await self._run(calls)
        if fault_points.IS_ON:
            fault_points.after_append(appends)
        results: dict[int, Any] = {}
        for mine, reply in zip(places.values(), replies, strict=True):
            if not isinstance(reply, Unavailable):
                results.update(zip(mine, reply, strict=True))
        outcomes = {i: AppendOutcome(AppendKind(found[0]), found[1]) for i, found in results.items()}
        for i, outcome in outcomes.items():
            is_over = self._session.held.drop_if_over(appends[i], outcome)
            if self._isolation.run is not None:
                self._isolation.note_append(appends[i], outcome, is_over=is_over)
        await self._wake(
            (wake_up_message(self._slice_of(appends[i])), found[2]) for i, found in results.items() if found[2]
        )
        return [outcomes.get(i, AppendOutcome(AppendKind.AWAY, 0)) for i in range(len(appends))]

    async def append_tokens(self, batches: Sequence[TokenAppends]) -> list[TokenOutcomes | None]:
        """Append plain tokens to their logs; see EngineSession.append_tokens."""
        retention_ms = self._session.settings.retention_s * 1000
        channels = self._session.connection.keyspace.wake_ups("")
        calls = [
            Call(
                APPEND, self._session.identity.partition(batch.partition).prefix, (retention_ms, batch.values, channels)
            )
            for batch in batches
        ]
        if fault_points.IS_ON:
            fault_points.before_append([append for batch in batches for append in batch.appends()])
        replies = await self._run(calls)
        if fault_points.IS_ON:
            fault_points.after_append([append for batch in batches for append in batch.appends()])
        answered = [
            (batch, reply) for batch, reply in zip(batches, replies, strict=True) if not isinstance(reply, Unavailable)
        ]
        outcomes = {id(batch): self._token_outcomes(batch, reply) for batch, reply in answered}
        await self._wake(
            (batch.wake_up(place), found[2])
            for batch, reply in answered
            for place, found in enumerate(reply)
            if found[2]
        )
        return [outcomes.get(id(batch)) for batch in batches]

    def _token_outcomes(self, batch: TokenAppends, reply: Sequence[tuple[int, int, bytes]]) -> TokenOutcomes:
        """Return the outcomes, apart those that did not only make a log longer.

        A suspect has passed with its claim's first token.
        """
        kinds, next_indexes, _ = zip(*reply, strict=True)
        if not any(kinds):
            return TokenOutcomes(next_indexes, {})
        appends = batch.appends()
        others = {
            place: (appends[place], AppendOutcome(AppendKind(kind), index))
            for place, (kind, index, _) in enumerate(reply)
            if kind
        }
        for append, outcome in others.values():
            self._session.held.drop_if_over(append, outcome)
        return TokenOutcomes(next_indexes, others)

    async def mark(self, *, running: Collection[str], waiting: Collection[str], stalled: Collection[str]) -> None:
        """Record which requests are in the running step; see EngineSession.mark."""
        by_partition: defaultdict[Partition, list[Argument]] = defaultdict(list)
        for request_ids, step in ((running, 1), (waiting, 0), (stalled, 2)):
            for request_id in request_ids:
                if request_id in self._session.held:
                    fence = self._session.held.fence(request_id)
                    by_partition[self._session.identity.partition_of(request_id)] += [request_id, *fence, step]
        await self._session.connection.run_many(
            [Call(MARK, where.prefix, each) for where, each in by_partition.items()]
        )

    async def _run(self, calls: Sequence[Call]) -> list[Any]:
        # A cluster's silent node must not hold up the others' tokens.
        limit_s = 2 * self._session.settings.beat_limit_s if self._session.connection.is_cluster else None
        return await self._session.connection.run_each_acknowledged(calls, limit_s)

    async def _wake(self, wake_ups: Iterable[tuple[bytes, bytes]]) -> None:
        if self._session.connection.is_cluster:
            self._wake_ups.send(wake_ups)  # no step waits for the node of a gateway's channel, which may be silent
        else:
            await publish_wake_ups(self._session.connection, wake_ups)

    def _slice_of(self, append: Append) -> LogSlice:
        return slice_of(append, "" if append.first_index else self._session.identity.fingerprint)


def slice_of(append: Append, fingerprint: str = "") -> LogSlice:
    """Return what a wake-up carries of an append; with a log's first entries, the fingerprint of their engine."""
    return LogSlice(
        request_id=append.request_id,
        first_index=append.first_index,
        entries=map(to_log_entry, append.entries),
        previous_digest=append.previous_digest,
        fingerprint=fingerprint,
    )


def append_arguments(
    retention_ms: int,
    appends: Sequence[Append],
    *,
    channels: str,
    first_slice: Callable[[Append], LogSlice] | None,
) -> list[Argument]:
    """Return append.lua's arguments for appends to one partition.

    Args:
        retention_ms: how long an ended log is kept.
        channels: prefix of the gateways' channels.
        first_slice: makes the wake-ups of first entries, which the script publishes. None where it must not, since
            writes have to wait for disk or replicas, or where the gateways' channels may be on another node.
    """
    values: list[str | int | bytes] = []
    arguments: list[Argument] = [retention_ms, "", channels]
    for each in appends:
        first_index, entries, cached = each.first_index, each.entries, each.cached_tokens
        wake_up: str | int = ""
        if first_slice is not None and first_index == 0:
            arguments.append(wake_up_message(first_slice(each)))
            wake_up = len(arguments)
        values += (
            each.request_id,
            str(each.epoch),
            each.nonce,
            first_index,
            "" if cached is None else cached,
            len(entries),
            wake_up,
        )
        for entry in entries:
            values += entry
            extra = entry[-1]
            if isinstance(extra, bytes):
                arguments.append(extra)
                values[-1] = len(arguments)
    arguments[1] = orjson.dumps(values)
    return arguments
