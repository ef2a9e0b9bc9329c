"""The log's invariants: durable before visible, contiguous, fenced, one end; and logs that are opened in pages."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_STOP, FinishReason
from pagestream.v1.records_pb2 import LogEntry, WakeUp
from pagestream_streams import Append, AppendKind, AppendOutcome, Broker, GatewaySession, expire_engine
from pagestream_streams.protocol import Keyspace, chain, from_stream_fields, to_entry_values
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import (
    TENANT,
    append_of,
    ending,
    eventually,
    numbers,
    read_all,
    spec,
    token,
    token_appends,
    tokens,
    worker,
)

pytestmark = pytest.mark.served


async def log_of(broker: Broker, request_id: str) -> list[LogEntry]:
    where = await broker.directory.locate(request_id)
    rows = await broker.connection.execute("XRANGE", where.log(request_id), "-", "+")
    return [from_stream_fields(fields) for _, fields in rows]


async def test_durable_before_visible(broker: Broker) -> None:
    """A wake-up leaves only after its entries are in the log, and a wake-up alone is never believed."""
    async with GatewaySession(broker) as gateway, worker(broker) as engine:
        request = spec()
        await gateway.accept(request)
        [claim] = await engine.claim()
        seen: list[LogEntry] = []

        async def read() -> None:
            async for batch in gateway.read(request.request_id, tenant=TENANT):
                logged = await log_of(broker, request.request_id)
                seen.extend(batch)
                assert seen == logged[: len(seen)]

        reading, digest = asyncio.create_task(read()), ""
        for index in range(20):
            digest = await engine.generate(claim, 1) if index == 0 else digest
            if index:
                [entry] = tokens([100 + index], digest)
                await engine.append(claim, index, [entry])
                digest = entry.digest
        forged = LogEntry(token_id=999, digest="0" * 16)
        message = WakeUp()
        message.slices.add(request_id=request.request_id, first_index=20, entries=[forged])
        await broker.connection.execute("PUBLISH", Keyspace().wake_ups(gateway.gateway_id), message.SerializeToString())
        await engine.append(claim, 20, ending(digest, count=20))
        await asyncio.wait_for(reading, LIMIT_S)
        assert numbers(seen) == list(range(100, 120))


class TestContiguous:
    async def test_repeat_of_equal_entries_is_a_no_op(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            await gateway.accept(spec())
            [claim] = await engine.claim()
            entries = tokens([1, 2, 3, 4])
            assert (await engine.append(claim, 0, entries[:3])).next_index == 3
            for first, last in [(0, 3), (1, 3), (0, 1), (1, 2), (2, 3)]:
                outcome = await engine.append(claim, first, entries[first:last])
                assert (outcome.kind, outcome.next_index) == (AppendKind.OK, 3)
            outcome = await engine.append(claim, 1, entries[1:])
            assert (outcome.kind, outcome.next_index) == (AppendKind.OK, 4)
            assert numbers(await log_of(broker, claim.request_id)) == [1, 2, 3, 4]

    @pytest.mark.parametrize(("first", "last"), [(0, 3), (1, 2), (0, 1), (2, 3), (2, 5), (0, 5)])
    async def test_other_entries_are_a_conflict(self, broker: Broker, first: int, last: int) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            await gateway.accept(spec())
            [claim] = await engine.claim()
            await engine.append(claim, 0, tokens([1, 2, 3]))
            others = tokens([9, 2, 3, 4, 5])
            outcome = await engine.append(claim, first, others[first:last])
            assert (outcome.kind, outcome.next_index) == (AppendKind.CONFLICT, 3)
            assert outcome.lost
            assert numbers(await log_of(broker, claim.request_id)) == [1, 2, 3]

    async def test_gap_is_refused_with_the_next_index(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            await gateway.accept(spec())
            [claim] = await engine.claim()
            entries = tokens([1, 2, 3])
            await engine.append(claim, 0, entries[:1])
            outcome = await engine.append(claim, 2, entries[2:])
            assert (outcome.kind, outcome.next_index) == (AppendKind.GAP, 1)
            assert not outcome.lost
            outcome = await engine.append(claim, 1, entries[1:])
            assert (outcome.kind, outcome.next_index) == (AppendKind.OK, 3)

    async def test_requests_of_one_step_don_t_touch_each_other(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            for partition in (0, 0, 1, 1):
                await gateway.accept(spec(partition=partition))
            claims = await engine.claim(4)
            entries = tokens([1, 2])
            await engine.append(claims[0], 0, entries)
            outcomes = await engine.session.append(
                [
                    append_of(claims[0], 0, tokens([8])),
                    append_of(claims[1], 0, entries, nonce="0" * 16),
                    append_of(claims[2], 1, entries[1:]),
                    append_of(claims[3], 0, entries),
                ]
            )
            kinds = [outcome.kind for outcome in outcomes]
            assert kinds == [AppendKind.CONFLICT, AppendKind.FENCED, AppendKind.GAP, AppendKind.OK]
            assert [len(await log_of(broker, claim.request_id)) for claim in claims] == [2, 0, 0, 2]

    async def test_tokens_as_bytes_are_appended_as_others_are(self, broker: Broker) -> None:
        """In two partitions: entries, outcomes and wake-ups; and a request that is lost is no longer held."""
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            for partition in (0, 0, 1, 1, 1):
                await gateway.accept(spec(partition=partition))
            claims = sorted(await engine.claim(5), key=lambda claim: claim.request_id[9:13])
            digests = [await engine.generate(claim, 2) for claim in claims]
            entries = [tokens([102, 103], digest) for digest in digests]
            batches = [
                token_appends(0, [append_of(claims[0], 2, entries[0]), append_of(claims[1], 3, entries[1][1:])]),
                token_appends(
                    1,
                    [
                        append_of(claims[2], 2, entries[2]),
                        append_of(claims[3], 2, tokens([9], digests[3]), nonce="0" * 16),
                        append_of(claims[4], 1, tokens([9], digests[4])),
                    ],
                ),
            ]
            heard = broker.connection.pubsub()
            await heard.subscribe(Keyspace().wake_ups("reader"))
            for claim in claims:
                where = await broker.directory.locate(claim.request_id)
                await broker.connection.execute("HSET", where.request(claim.request_id), "readers", "reader ")
            first, second = await engine.session.append_tokens(batches)
            assert first is not None
            assert second is not None
            assert first.next_indexes[0] == 4
            assert [(place, outcome) for place, (_, outcome) in first.others.items()] == [
                (1, AppendOutcome(AppendKind.GAP, 2))
            ]
            assert second.next_indexes[0] == 4
            assert [outcome.kind for _, outcome in second.others.values()] == [AppendKind.FENCED, AppendKind.CONFLICT]
            assert [numbers(await log_of(broker, claim.request_id)) for claim in claims] == [
                [100, 101, 102, 103], [100, 101], [100, 101, 102, 103], [100, 101], [100, 101]
            ]  # fmt: skip
            assert [claim.request_id in engine.session.held for claim in claims[2:]] == [True, True, False]
            woken: dict[str, list[LogEntry]] = {}
            while len(woken) < 2:
                message = await heard.get_message(ignore_subscribe_messages=True, timeout=LIMIT_S)
                slices = WakeUp.FromString(message["data"]).slices if message else ()
                woken |= {each.request_id: list(each.entries) for each in slices if each.first_index == 2}
            await heard.aclose()
            assert woken == {claims[place].request_id: entries[place] for place in (0, 2)}


class TestFenced:
    async def test_old_epoch(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker, "a") as a, worker(broker, "b") as b:
            await gateway.accept(spec())
            [old] = await a.claim()
            digest = await a.generate(old, 2)
            await expire_engine(broker, "a")
            entries = tokens([5], digest)
            assert (await a.append(old, 2, entries)).kind is AppendKind.FENCED, "while no engine has it"
            [new] = await b.claim()
            assert new.epoch == old.epoch + 1
            assert (new.next_index, new.digest, new.log.tokens[0].tolist()) == (2, digest, [100, 101])
            assert (await a.append(old, 2, entries)).kind is AppendKind.FENCED, "while another has it"
            await b.generate(new, 4, finish=True)
            assert numbers(await log_of(broker, old.request_id)) == [100, 101, 102, 103]

    async def test_same_epoch_with_another_nonce(self, broker: Broker) -> None:
        """Redis that lost its last second may issue an epoch twice."""
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            await gateway.accept(spec())
            [claim] = await engine.claim()
            for nonce in ("", "0" * 16):
                forged = append_of(claim, 0, tokens([1]), nonce=nonce)
                [outcome] = await engine.session.append([forged])
                assert outcome.kind is AppendKind.FENCED
            assert await log_of(broker, claim.request_id) == []

    async def test_unknown_request_is_missing(self, broker: Broker) -> None:
        async with worker(broker) as engine:
            [outcome] = await engine.session.append(
                [Append(spec().request_id, 1, "n", 0, list(map(to_entry_values, tokens([1]))))]
            )
            assert outcome.kind is AppendKind.MISSING


End = Callable[[], Awaitable[object]]


class TestOneEnd:
    @pytest.mark.parametrize("pair", list(itertools.permutations(["finish", "cancel", "deadline", "abandon"], 2)))
    async def test_whoever_is_second_changes_nothing(self, broker: Broker, pair: tuple[str, str]) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec(n=2)
            await gateway.accept(request)
            [claim] = await engine.claim()
            digest = await engine.generate(claim, 3)
            where = await broker.directory.locate(request.request_id)
            reasons: dict[str, FinishReason] = {}
            ends: dict[str, End] = {
                "finish": lambda: engine.append(claim, 3, ending(digest, count=3)),
                "cancel": lambda: broker.cancel(request.request_id, TENANT),
                "deadline": lambda: broker.end_request(where, request.request_id, "deadline"),
                "abandon": lambda: broker.end_request(where, request.request_id, "cancelled"),
            }
            for name in pair:
                await ends[name]()
                reasons[name] = (await broker.view(request.request_id, TENANT)).finish_reason
            assert reasons[pair[0]] == reasons[pair[1]]
            entries = await log_of(broker, request.request_id)
            assert [entry.HasField("end") for entry in entries] == [False] * (len(entries) - 1) + [True]
            assert await read_all(gateway, request.request_id) == entries

    async def test_races_of_all_at_once(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            for _ in range(20):
                request = spec()
                await gateway.accept(request)
                [claim] = await engine.claim()
                where = await broker.directory.locate(request.request_id)
                await asyncio.gather(
                    engine.append(claim, 0, [*tokens([1]), *ending(tokens([1])[0].digest, count=1)]),
                    broker.cancel(request.request_id, TENANT),
                    broker.end_request(where, request.request_id, "deadline"),
                )
                entries = await log_of(broker, request.request_id)
                assert sum(entry.HasField("end") for entry in entries) == 1
                assert entries[-1].HasField("end")

    async def test_finish_that_is_repeated_is_a_no_op(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            await gateway.accept(spec())
            [claim] = await engine.claim()
            digest = await engine.generate(claim, 2)
            end = ending(digest, count=2)
            assert (await engine.append(claim, 2, end)).kind is AppendKind.OK
            assert (await engine.append(claim, 2, end)).kind is AppendKind.OK
            other = ending(digest, count=2, reason=FINISH_REASON_CANCELLED)
            assert (await engine.append(claim, 2, other)).kind is AppendKind.ENDED
            assert (await engine.append(claim, 4, tokens([1]))).kind is AppendKind.ENDED
            assert (await broker.view(claim.request_id, TENANT)).finish_reason == FINISH_REASON_STOP

    async def test_owner_s_next_append_is_refused_and_it_is_told(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec()
            await gateway.accept(request)
            [claim] = await engine.claim()
            digest = await engine.generate(claim, 1)
            assert await broker.cancel(request.request_id, TENANT) == FINISH_REASON_CANCELLED
            assert (await engine.append(claim, 1, tokens([2], digest))).kind is AppendKind.ENDED
            [other] = [spec()]
            await gateway.accept(other)
            await engine.claim()
            await broker.cancel(other.request_id, TENANT)
            # A heartbeat may have reported the first one as well, before its append was answered.
            await eventually(lambda: other.request_id in engine.lost)

    async def test_cancel_ends_open_choices_only_and_tells_the_usage(self, broker: Broker) -> None:
        async with GatewaySession(broker) as gateway, worker(broker) as engine:
            request = spec(n=3)
            await gateway.accept(request)
            [claim] = await engine.claim()
            first = [*tokens([1]), ending(tokens([1])[0].digest, count=1)[0], token(5, choice=2)]
            first[2].digest = chain(first[1].digest, first[2])
            appended = append_of(claim, 0, first, cached_tokens=2)
            [outcome] = await engine.session.append([appended])
            assert outcome.kind is AppendKind.OK
            await broker.cancel(request.request_id, TENANT)
            entries = await read_all(gateway, request.request_id)
            finishes = [(entry.choice, entry.finish.reason) for entry in entries if entry.HasField("finish")]
            assert finishes == [(0, FINISH_REASON_STOP), (1, FINISH_REASON_CANCELLED), (2, FINISH_REASON_CANCELLED)]
            usage = entries[-1].end.usage
            assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 2, 2)


# -- A log of the greatest length that the API allows is opened in pages, and beats go between them.


NUM_CHOICES, NUM_TOKENS = 128, 128 * 200
_GENERATE = """
for i = 1, ARGV[1] do
  redis.call('XADD', KEYS[1], i .. '-0', 'c', (i - 1) % ARGV[2], 't', i % 30000, 'x', ' word', 'd', '0123456789abcdef')
end
redis.call('HSET', KEYS[2], 'next', ARGV[1], 'digest', '0123456789abcdef')
"""


async def test_beats_go_between_the_pages(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    request = spec(n=NUM_CHOICES)
    async with GatewaySession(broker) as gateway:
        await gateway.accept(request)
    where = await broker.directory.locate(request.request_id)
    keys = where.log(request.request_id), where.request(request.request_id)
    await broker.connection.execute("EVAL", _GENERATE, 2, *keys, NUM_TOKENS, NUM_CHOICES)
    execute, pages, beat_at = broker.connection.execute, [], []

    async with worker(broker) as engine:

        async def watched(*command: Any) -> Any:
            reply = await execute(*command)
            if command[0] == "XRANGE":
                pages.append(len(reply))
                if len(pages) == 2:
                    await engine.session.lease.beat()
                    beat_at.append(len(pages))
            return reply

        monkeypatch.setattr(broker.connection, "execute", watched)
        async with asyncio.timeout(LIMIT_S):
            [claim] = await engine.claim()
        assert max(pages) <= NUM_TOKENS / 4
        assert beat_at[0] < len(pages)
        assert claim.log.num_tokens == sum(pages) == NUM_TOKENS
        assert claim.log.tokens[5][:3].tolist() == [6, 134, 262]
        assert claim.log.tokens[0].itemsize == 4, "bytes a token: the texts are left in Redis"
        assert engine.lost == []
        assert (await broker.view(request.request_id, TENANT)).attempts == 1
