"""The protocol against a small model: two engines, a reclaimer, a canceller and readers, in any order."""

import asyncio
import dataclasses
import sys
from collections.abc import Collection, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pagestream.v1.records_pb2 import LogEntry
from pagestream_streams import AppendKind, Broker, Claim, EngineSession, GatewaySession, expire_engine, scripts
from pagestream_streams.engine import append_arguments
from pagestream_streams.protocol import ClaimedLog, from_stream_fields
from pagestream_streams.scripts import Script
from redis.exceptions import ResponseError
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import MODEL, STILL, TENANT, append_of, card, ending, numbers, spec, tokens
from support.redis.topologies import Place, fresh

pytestmark = pytest.mark.served

T = TypeVar("T")
ENGINES = ("a", "b")
ANYBODY_S = dataclasses.replace(STILL, steal_after_ms=0)  # whose partition it is must not matter


class Model:
    """What the log must be: written by the tests' own rules, in Python."""

    def __init__(self) -> None:
        self.log: list[LogEntry] = []
        self.ended = False
        self.owner: Claim | None = None
        self.claims = 0

    @property
    def digest(self) -> str:
        return self.log[-1].digest if self.log else ""


class Protocol(RuleBasedStateMachine):
    server: Place

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.model = Model()
        self.held: dict[str, list[Claim]] = {name: [] for name in ENGINES}
        self.seen: list[LogEntry] = []

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(LIMIT_S):
                return await step

        return self.runner.run(limited())

    @initialize()
    def accept(self) -> None:
        url = fresh(self.server)

        async def start() -> None:
            self.broker = await self.stack.enter_async_context(await Broker.connect(url, ANYBODY_S))
            await self.broker.publish_model(card(), partitions=1)
            self.gateway = await self.stack.enter_async_context(GatewaySession(self.broker))
            self.engines = {
                name: await self.stack.enter_async_context(
                    EngineSession(self.broker, model=MODEL, engine_id=name, on_lost=ignore)
                )
                for name in ENGINES
            }
            self.request = spec()
            await self.gateway.accept(self.request)

        self.run(start())

    @rule(name=st.sampled_from(ENGINES))
    def claim(self, name: str) -> None:
        where = self.run(self.broker.directory.locate(self.request.request_id))
        # Past the doorbell and the age of others' entries: each claim looks.
        claims = self.run(self.engines[name].claimer.claim_from(where, 4, 1000))
        self.engines[name].claimer.hold(claims)
        if self.model.ended or self.model.owner is not None:
            assert claims == []
            return
        [claim] = claims
        self.model.claims += 1
        assert (claim.epoch, claim.attempts) == (self.model.claims, self.model.claims)
        assert claim.log == ClaimedLog.of(self.model.log)
        assert (claim.next_index, claim.digest) == (len(self.model.log), self.model.digest)
        self.model.owner = claim
        self.held[name].append(claim)

    @precondition(lambda self: self.model.owner is not None)
    @rule(token=st.integers(0, 2), count=st.integers(1, 3))
    def go_on(self, token: int, count: int) -> None:
        """What an engine does all day."""
        claim = self.model.owner
        assert claim is not None
        name = next(name for name, claims in self.held.items() if any(each is claim for each in claims))
        entries = tokens([token] * count, self.model.digest)
        step = append_of(claim, len(self.model.log), entries)
        [outcome] = self.run(self.engines[name].append([step]))
        assert outcome.kind is AppendKind.OK
        self.model.log += entries

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        """Any claim that was ever got, anywhere around the log's end, with the log's own entries or others."""
        name, claim = data.draw(st.sampled_from([(name, claim) for name, all_ in self.held.items() for claim in all_]))
        first = data.draw(st.integers(0, len(self.model.log) + 1))
        count = data.draw(st.integers(1, 3))
        kept = data.draw(st.integers(0, count))
        entries = list(self.model.log[first : first + kept])
        digest = (
            entries[-1].digest
            if entries
            else self.model.log[first - 1].digest
            if 0 < first <= len(self.model.log)
            else ""
        )
        entries += tokens(
            data.draw(st.lists(st.integers(0, 2), min_size=count - len(entries), max_size=count - len(entries))), digest
        )
        if data.draw(st.integers(0, 3)) == 0 and not any(entry.HasField("end") for entry in entries):
            entries += ending(entries[-1].digest, count=0)
        entries = up_to_end(entries)
        expected = self.expected(claim, first, entries)
        [outcome] = self.run(self.engines[name].append([append_of(claim, first, entries)]))
        assert outcome.kind is expected, (outcome, expected)
        if outcome.kind is AppendKind.OK and not self.model.ended:
            self.model.log[first : first + len(entries)] = entries
            if entries[-1].HasField("end"):
                self.model.ended, self.model.owner = True, None
        if outcome.kind is AppendKind.GAP:
            assert outcome.next_index == len(self.model.log)

    def expected(self, claim: Claim, first: int, entries: list[LogEntry]) -> AppendKind:
        log, repeated = self.model.log, self.model.log[first : first + len(entries)]
        equal = all(one.digest == other.digest for one, other in zip(repeated, entries, strict=False))
        if self.model.ended:
            return AppendKind.OK if len(repeated) == len(entries) and equal else AppendKind.ENDED
        owner = self.model.owner
        if owner is None or (owner.epoch, owner.nonce) != (claim.epoch, claim.nonce):
            return AppendKind.FENCED
        if first > len(log):
            return AppendKind.GAP
        return AppendKind.OK if equal else AppendKind.CONFLICT

    @precondition(lambda self: self.model.owner is not None)
    @rule(name=st.sampled_from(ENGINES), dead=st.booleans())
    def release_by(self, name: str, dead: bool) -> None:
        """Its engine is found dead, or hands it back; the other engine's death or hand-back changes nothing."""
        if dead:
            self.run(expire_engine(self.broker, name))
        else:
            self.run(self.engines[name].hand_back([self.request.request_id]))
        self.release(name)

    def release(self, name: str) -> None:
        owner = self.model.owner
        if owner is not None and any(claim is owner for claim in self.held[name]):
            self.model.owner = None

    @precondition(lambda self: self.model.claims > 1)
    @rule(reason=st.sampled_from(["cancel", "deadline"]))
    def end(self, reason: str) -> None:
        where = self.run(self.broker.directory.locate(self.request.request_id))
        if reason == "cancel":
            self.run(self.broker.cancel(self.request.request_id, TENANT))
        else:
            self.run(self.broker.end_request(where, self.request.request_id, "deadline"))
        log = self.run(self.logged())
        if self.model.ended:
            assert log == self.model.log
            return
        assert log[: len(self.model.log)] == self.model.log
        assert [entry.WhichOneof("body") for entry in log[len(self.model.log) :]][-1] == "end"
        self.model.log, self.model.ended, self.model.owner = log, True, None

    @rule()
    def read_on(self) -> None:
        """A reader goes on from where the one before it was, by its digest."""
        digest = self.seen[-1].digest if self.seen else ""
        if self.seen and self.seen[-1].HasField("end"):
            return

        async def take() -> list[LogEntry]:
            stream = self.gateway.read(self.request.request_id, tenant=TENANT, from_index=len(self.seen), digest=digest)
            async with aclosing(stream) as batches:
                return await anext(batches) if len(self.model.log) > len(self.seen) else []

        self.seen += self.run(take())
        assert self.seen == self.model.log[: len(self.seen)]

    @invariant()
    def log_is_the_model_s(self) -> None:
        if not hasattr(self, "request"):
            return
        log = self.run(self.logged())
        assert log == self.model.log, (numbers(log), numbers(self.model.log))
        assert sum(entry.HasField("end") for entry in log) == int(self.model.ended)
        view = self.run(self.broker.view(self.request.request_id, TENANT))
        assert (view.next_index, view.digest) == (len(log), self.model.digest)

    async def logged(self) -> list[LogEntry]:
        where = await self.broker.directory.locate(self.request.request_id)
        rows = await self.broker.connection.execute("XRANGE", where.log(self.request.request_id), "-", "+")
        return [from_stream_fields(fields) for _, fields in rows]

    def teardown(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()


def ignore(_: Collection[str]) -> None:
    """What is lost shows in the appends' outcomes."""


def up_to_end(entries: list[LogEntry]) -> list[LogEntry]:
    for index, entry in enumerate(entries):
        if entry.HasField("end"):
            return entries[: index + 1]
    return entries


def check(redis_server: Place, max_examples: int, phases: Sequence[Phase] = tuple(Phase)) -> None:
    class OnThisServer(Protocol):
        server = redis_server

    run_state_machine_as_test(
        OnThisServer,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            derandomize=True,
            database=None,
            phases=phases,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )


@pytest.mark.parametrize("max_examples", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_protocol_is_its_model(redis_server: Place, max_examples: int) -> None:
    check(redis_server, max_examples)


@pytest.mark.parametrize(
    ("sound", "broken"),
    [
        ("state[2] ~= epoch or state[3] ~= nonce", "false"),
        *(
            pytest.param(*change, marks=pytest.mark.slow)
            for change in (
                ("if known < 0 then", "if false then"),
                ("if known > 0 and not repeats(id, next_index, first, known, at) then", "if false then"),
                ("is_there and OK or ENDED", "OK"),
                ("retire(id, call('HGET', req, 'owner'), state[5], values[last + 2], retention)", ""),
            )
        ),
    ],
)
def test_the_model_catches_a_broken_append(
    redis_server: Place, monkeypatch: pytest.MonkeyPatch, sound: str, broken: str
) -> None:
    """A check that can't fail would prove nothing."""
    assert sound in scripts.APPEND.text
    changed = Script("append", scripts.APPEND.text.replace(sound, broken))
    monkeypatch.setattr(sys.modules[append_arguments.__module__], "APPEND", changed)
    with pytest.raises((AssertionError, ResponseError)):
        check(redis_server, 60, [Phase.generate])
