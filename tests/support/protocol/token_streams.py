"""Requests, entries and engines for tests of the durable token stream."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import ModuleType
from typing import TypeVar, cast

from pagestream.v1.inference_pb2 import (
    FINISH_REASON_STOP,
    ON_DISCONNECT_CANCEL,
    FinishReason,
    OnDisconnect,
    SamplingParams,
    TokenIds,
    Usage,
)
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, LogSlice, ModelCard, RequestSpec, WakeUp
from pagestream_streams import (
    Append,
    AppendKind,
    AppendOutcome,
    Broker,
    Claim,
    EngineSession,
    GatewaySession,
    StreamsSettings,
    Unavailable,
)
from pagestream_streams.engine import append_arguments
from pagestream_streams.protocol import TokenAppends, chained, new_request_id, to_entry_values, to_log_entry
from support.processes.waiting import LIMIT_S

T = TypeVar("T")

MODEL = "test/model"
TENANT = "tenant-a"

# Beats and sweeps come soon. No lease lapses by itself, however slow the machine: a test's dead are let go by `lapse`.
CALM = StreamsSettings(
    lease_ms=120_000,
    heartbeat_ms=60,
    sweep_ms=40,
    sweep_gap_ms=60_000,
    control_leases=1.5,
    storm_leases=7.5,
    silence_ms=50,
    poll_ms=60,
    steal_after_ms=20,
    accepted_unread_ms=60_000,
    directory_ttl_s=0.2,
    command_timeout_s=30.0,
)
# Leases lapse in 0.6 s: for tests that wait for it, and where a slow machine's lapse does no harm.
FAST = replace(
    CALM,
    lease_ms=600,
    sweep_gap_ms=400,
    control_leases=2.0,
    storm_leases=10.0,
    accepted_unread_ms=10_000,
    command_timeout_s=3.0,
)
# What is accepted and not read in 300 ms is left by its gateway.
FORGETFUL = replace(CALM, accepted_unread_ms=300)
# Timers that never fire: for tests that drive each step.
STILL = StreamsSettings(lease_ms=600_000, heartbeat_ms=100_000, sweep_ms=100_000, sweep_gap_ms=400_000)


def card(name: str = MODEL) -> ModelCard:
    return ModelCard(name=name, max_model_len=4096, vocab_size=1000, architecture="Test")


def spec(
    request_id: str = "",
    *,
    partition: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    tenant: str = TENANT,
    n: int = 1,
    priority: int = 0,
    deadline_ms: int = 0,
    grace_ms: int = 60_000,
    on_disconnect: OnDisconnect = ON_DISCONNECT_CANCEL,
    key: str = "",
) -> RequestSpec:
    return RequestSpec(
        request_id=request_id or new_request_id(MODEL, partition, tenant),
        model=MODEL,
        tenant=tenant,
        prompts=[TokenIds(ids=prompt)],
        sampling=SamplingParams(seed=7, n=n),
        priority=priority,
        deadline_ms=deadline_ms,
        disconnect_grace_ms=grace_ms,
        on_disconnect=on_disconnect,
        idempotency_key=key,
    )


def token(number: int, choice: int = 0) -> LogEntry:
    return LogEntry(choice=choice, token_id=number, text=f" {number}")


def tokens(numbers: Sequence[int], previous: str = "", choice: int = 0) -> list[LogEntry]:
    return chained(previous, [token(number, choice) for number in numbers])


def ending(previous: str, *, count: int, prompt: int = 3, reason: FinishReason = FINISH_REASON_STOP) -> list[LogEntry]:
    usage = Usage(prompt_tokens=prompt, completion_tokens=count)
    finish, end = LogEntry(finish=ChoiceFinish(reason=reason)), LogEntry(end=LogEnd(reason=reason, usage=usage))
    return chained(previous, [finish, end])


def append_of(
    claim: Claim,
    first_index: int,
    entries: Sequence[LogEntry],
    *,
    nonce: str | None = None,
    previous_digest: str = "",
    cached_tokens: int | None = None,
) -> Append:
    """An append by a claim; `nonce`: instead of the claim's."""
    values = list(map(to_entry_values, entries))
    return Append(
        claim.request_id,
        claim.epoch,
        claim.nonce if nonce is None else nonce,
        first_index,
        values,
        previous_digest,
        cached_tokens,
    )


def numbers(entries: Sequence[LogEntry]) -> list[int]:
    return [entry.token_id for entry in entries if entry.HasField("token_id")]


async def eventually(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Wait until a condition holds; TimeoutError after the limit."""
    async with asyncio.timeout(limit_s):
        while True:
            result = condition()
            if (await result) if isinstance(result, Awaitable) else result:
                return
            await asyncio.sleep(0.01)


async def once_there(step: Callable[[], Awaitable[T]]) -> T:
    """Repeat a step while it raises Unavailable, and return its result."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                return await step()
            except Unavailable:
                await asyncio.sleep(0.02)


def home_of(part: object) -> ModuleType:
    """Return the module of an object's class, where the constants are that it goes by."""
    return sys.modules[type(part).__module__]


async def lapse(broker: Broker, *dead: EngineSession | GatewaySession) -> None:
    """Let the leases of processes that have died run out now."""
    for session in dead:
        is_engine = isinstance(session, EngineSession)
        holder = session.engine_id if isinstance(session, EngineSession) else session.gateway_id
        leases = "leases" if is_engine else "gateways"
        keys = [f"{where.prefix}{leases}" for where in await broker.directory.all_partitions(MODEL)]
        if is_engine:
            keys.append(broker.connection.keyspace.engines(MODEL))
        for key in keys:
            await broker.connection.execute("ZADD", key, "XX", 1, holder)


_PASS = """
for _, key in ipairs({'suspects', 'verdicts', 'deaths'}) do
  for _, id in ipairs(redis.call('ZRANGE', KEYS[1] .. key, 0, -1)) do
    redis.call('ZINCRBY', KEYS[1] .. key, -ARGV[1], id)
    if redis.call('HEXISTS', KEYS[1] .. 'req:' .. id, 'died_first') == 1 then
      redis.call('HINCRBY', KEYS[1] .. 'req:' .. id, 'died_first', -ARGV[1])
    end
  end
end
for _, field in ipairs({'up', 'alone_died'}) do
  if redis.call('HEXISTS', KEYS[1] .. 'meta', field) == 1 then
    redis.call('HINCRBY', KEYS[1] .. 'meta', field, -ARGV[1])
  end
end
"""


async def pass_control_time(broker: Broker) -> None:
    """Have the time in which engines run without suspects be over: each death moves back by so much."""
    for where in await broker.directory.all_partitions(MODEL):
        await broker.connection.execute("EVAL", _PASS, 1, where.prefix, broker.settings.control_ms)


async def read_all(
    gateway: GatewaySession, request_id: str, from_index: int = 0, digest: str = "", *, limit_s: float = LIMIT_S
) -> list[LogEntry]:
    """Read a log up to its end."""
    result: list[LogEntry] = []
    async with (
        asyncio.timeout(limit_s),
        aclosing(gateway.read(request_id, tenant=TENANT, from_index=from_index, digest=digest)) as batches,
    ):
        async for batch in batches:
            result += batch
    return result


def token_appends(partition: int, appends: Sequence[Append]) -> TokenAppends:
    """Return appends of tokens to one partition in the form that an engine's logs make."""
    made = [
        WakeUp(slices=[LogSlice(request_id=each.request_id, first_index=each.first_index, entries=entries)])
        for each in appends
        for entries in [list(map(to_log_entry, each.entries))]
    ]
    wake_ups = [each.SerializeToString() for each in made]
    made_of = {each.request_id: message for each, message in zip(appends, made, strict=True)}
    arguments = append_arguments(
        0, {"": appends}, channels="-", make_slice=lambda each: made_of[each.request_id].slices[0]
    )
    values = cast(bytes, arguments[1])[len(b'["",') : -1]
    ends = [each.first_index + len(each.entries) for each in appends]
    return TokenAppends(partition, len(appends), values, ends, b"".join(wake_ups), list(accumulate(map(len, wake_ups))))


@dataclass
class Worker:
    """An engine without a model: its tokens are 100, 101, 102, ..."""

    session: EngineSession
    lost: list[str] = field(default_factory=list)

    async def claim(self, count: int = 1) -> list[Claim]:
        """Wait for `count` claims; try again where Redis takes too long, as an engine does."""
        claims: list[Claim] = []
        async with asyncio.timeout(LIMIT_S):
            while len(claims) < count:
                with suppress(Unavailable):
                    claims += await self.session.claim(max_requests=count - len(claims), max_prompt_tokens=1_000_000)
                if len(claims) < count:
                    await self.session.wait_for_work(0.05)
        return claims

    async def append(self, claim: Claim, first: int, entries: Sequence[LogEntry]) -> AppendOutcome:
        [outcome] = await self.session.append([append_of(claim, first, entries)])
        return outcome

    async def generate(self, claim: Claim, count: int, *, finish: bool = False) -> str:
        """Generate up to `count` tokens in all, an append each, again where Redis can't serve; return the digest."""

        async def append(index: int, entries: Sequence[LogEntry]) -> None:
            outcome = await once_there(lambda: self.append(claim, index, entries))
            assert outcome.kind is AppendKind.OK, outcome

        digest = claim.digest
        for index in range(claim.next_index, count):
            [entry] = tokens([100 + index], digest)
            await append(index, [entry])
            digest = entry.digest
        if finish:
            await append(count, ending(digest, count=count))
        return digest


@asynccontextmanager
async def worker(broker: Broker, name: str = "engine") -> AsyncIterator[Worker]:
    lost: list[str] = []

    def on_lost(request_ids: Collection[str]) -> None:
        lost.extend(request_ids)

    async with EngineSession(broker, model=MODEL, engine_id=name, on_lost=on_lost) as session:
        yield Worker(session, lost)
