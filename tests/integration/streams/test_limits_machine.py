"""The limits' scripts against a small model, in virtual time: requests, ends, losses and repeats in any order."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from pagestream_streams.connection.embedded import EmbeddedRedis
from redis import Redis
from support.protocol.virtual_streams import VirtualStreams
from support.redis.servers import emptied

RUN = "boot"
ACCEPT_MS, KEPT_DAYS = 15_000, 400  # no run of the test takes as long
START_MS = 1_800_000_000_123
# Window: slots, ms of a slot, ms that it must hold at least.
WINDOWS = ((60, 1000, 60_000), (60, 1000, 60_000), (96, 900_000, 86_400_000))
REQUESTS, TOKENS, DAY, RUNNING, QUEUED = range(5)
LIMITS = {"": (6, 300, 900, 4, 120), "k": (4, 200, 0, 3, 80), "free": (0, 0, 0, 0, 0)}


@dataclass
class Charge:
    """What counts in the windows for one request."""

    scopes: tuple[str, ...]
    at: int
    tokens: int
    requests: int = 1
    more: tuple[int, int] = (0, 0)
    """When it ended, and the tokens beyond those reserved."""


@dataclass
class Held:
    charge: Charge
    prompt: int
    stage: str = "queued"
    tries: int = 1


@dataclass
class Model:
    charges: list[Charge] = field(default_factory=list)
    held: dict[str, Held] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def counted(self, scope: str, kind: int, now: int, *, by_ms: bool = False) -> int:
        """What counts in a window; `by_ms`: of its exact length, without what was used beyond a reservation."""
        slots, slot_ms, length_ms = WINDOWS[kind]
        total = 0
        for each in self.charges:
            if scope in each.scopes:
                for at, amount in (
                    (each.at, each.requests if kind == REQUESTS else each.tokens),
                    (each.more[0], 0 if kind == REQUESTS or by_ms else each.more[1]),
                ):
                    is_in = now - at < length_ms if by_ms else now // slot_ms - at // slot_ms <= slots
                    total += amount if is_in else 0
        return total

    def running(self, scope: str) -> int:
        return sum(scope in each.charge.scopes and each.stage != "ended" for each in self.held.values())

    def queued(self, scope: str) -> int:
        return sum(each.prompt for each in self.held.values() if scope in each.charge.scopes and each.stage == "queued")

    def is_full(self, key: str, prompt: int, tokens: int, now: int) -> set[int]:
        """Places, from 1 on, of the limits that refuse a request."""
        places = set()
        for number, scope in enumerate(scopes_of(key)):
            limits = LIMITS[scope]
            used = [self.counted(scope, kind, now) for kind in range(3)] + [self.running(scope), self.queued(scope)]
            for place, (limit, have, more) in enumerate(zip(limits, used, (1, tokens, tokens, 1, prompt), strict=True)):
                if limit and have + more > limit:
                    places.add(5 * number + place + 1)
        return places


def scopes_of(key: str) -> tuple[str, ...]:
    return ("", key) if key else ("",)


class Limits(RuleBasedStateMachine):
    client: Redis
    streams: VirtualStreams

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.model = Model()
        self.now = START_MS
        self.ids = 0
        self.outbox: dict[str, list[str | int]] = {}
        self.usage: defaultdict[str, int] = defaultdict(int)
        self.positions = 0

    def run_script(self, name: str, *arguments: str | int) -> list[object]:
        self.streams.expire(self.now)
        reply: list[object] = self.streams.run(name, arguments, self.now, RUN)
        return reply

    @rule(ms=st.sampled_from((0, 1, 999, 1000, 20_000, 60_000, 61_000, 900_000, 86_400_000)))
    def wait(self, ms: int) -> None:
        self.now += ms

    @rule(
        key=st.sampled_from(("", "k", "free")),
        prompt=st.integers(1, 90),
        output=st.integers(0, 120),
        is_again=st.booleans(),
        bounded=st.sampled_from((1, 1, 1, 0)),
    )
    def admit(self, key: str, prompt: int, output: int, is_again: bool, bounded: int) -> None:
        known = sorted(self.model.held)
        self.ids += 1
        name = known[self.ids % len(known)] if is_again and known else f"r{self.ids}"
        held, tokens = self.model.held.get(name), prompt + output
        full = self.model.is_full(key, prompt, tokens, self.now) if held is None and bounded else set()
        second = LIMITS[key] if key else (0,) * 5
        code, *reply = self.run_script(
            "limits/admit",
            name,
            key,
            prompt,
            tokens,
            bounded,
            ACCEPT_MS,
            0,
            128,
            KEPT_DAYS * 86_400_000,
            *LIMITS[""],
            *second,
        )
        assert bool(code) == (not full), (full, reply)
        if full:
            place, _, wait_ms = reply[:3]
            assert place in full
            self.check_wait(int(str(place)), int(str(wait_ms)), key, prompt, tokens)
            return
        assert reply[0] == (1 if held is None else 0)
        if held is None:
            charge = Charge(scopes_of(key), self.now, tokens)
            self.model.charges.append(charge)
            self.model.held[name] = Held(charge, prompt)
        else:
            held.tries += 1
        self.check_rows(key, reply[1])

    def check_wait(self, place: int, wait_ms: int, key: str, prompt: int, tokens: int) -> None:
        """Were nothing else sent, the request would fit then, and not a ms sooner."""
        if (place - 1) % 5 > DAY:
            assert wait_ms > 0 or prompt > LIMITS[scopes_of(key)[place // 6]][QUEUED]
            return
        if wait_ms < 0:
            assert (1, tokens, tokens)[(place - 1) % 5] > LIMITS[scopes_of(key)[place // 6]][(place - 1) % 5]
            return
        windows = {1, 2, 3, 6, 7, 8}
        assert not self.model.is_full(key, prompt, tokens, self.now + wait_ms) & windows
        assert self.model.is_full(key, prompt, tokens, self.now + wait_ms - 1) & windows

    def check_rows(self, key: str, rows: object) -> None:
        """What answers say of each limit."""
        assert isinstance(rows, list)
        found = {place: used for place, used, _ in rows}
        for number, scope in enumerate(scopes_of(key)):
            for kind, limit in enumerate(LIMITS[scope][:QUEUED]):
                used = self.model.running(scope) if kind == RUNNING else self.model.counted(scope, kind, self.now)
                assert found.get(5 * number + kind + 1) == (used if limit else None)

    @precondition(lambda self: self.model.held)
    @rule(pick=st.integers(0, 99), what=st.sampled_from(("none", "queued", "claimed", "ended", "past", "refused")))
    def note(self, pick: int, what: str) -> None:
        name = sorted(self.model.held)[pick % len(self.model.held)]
        held = self.model.held[name]
        self.run_script("limits/note", ACCEPT_MS, name, what)
        is_old = self.now - held.charge.at >= ACCEPT_MS
        if (what == "refused" and held.tries == 1) or (what == "none" and is_old):
            if held.stage != "ended":
                held.charge.tokens = held.charge.requests = 0
            del self.model.held[name]
        elif what == "claimed" and held.stage == "queued":
            held.stage = "claimed"
        elif what == "past":
            del self.model.held[name]
        elif what == "ended":
            held.stage = "ended"

    @precondition(lambda self: self.model.held)
    @rule(pick=st.integers(0, 99), output=st.integers(0, 200))
    def end(self, pick: int, output: int) -> None:
        """A request's end is written to its partition's stream, where the process that counts it finds it."""
        name = sorted(self.model.held)[pick % len(self.model.held)]
        if any(row[1] == name for row in self.outbox.values()):
            return
        held = self.model.held[name]
        self.positions += 1
        position = f"{self.now}-{self.positions}"
        key = held.charge.scopes[-1]
        self.outbox[position] = [
            *(position, name, key, "m", 1, held.prompt, 0, output),
            *(held.charge.at, self.now),
        ]

    @precondition(lambda self: self.outbox)
    @rule(keeps=st.booleans(), most=st.integers(1, 4))
    def fold(self, keeps: bool, most: int) -> None:
        """`keeps`: the process dies before it deletes what it has counted, and another one counts it again."""
        rows = list(self.outbox.values())[:most]
        reply = self.run_script(
            "limits/fold", "m/0", 300_000, 48, KEPT_DAYS, 1000, *(value for row in rows for value in row)
        )
        for row, is_new in zip(rows, reply, strict=True):
            name, tokens = str(row[1]), int(row[5]) + int(row[7])
            assert is_new == (name not in self.model.ended)
            if is_new:
                self.model.ended.add(name)
                self.usage["requests"] += 1
                self.usage["prompt"] += int(row[5])
                self.usage["output"] += int(row[7])
            held = self.model.held.pop(name, None)
            if is_new and held is not None:
                reserved = held.charge.tokens
                held.charge.tokens = min(reserved, tokens)
                held.charge.more = (self.now, max(0, tokens - reserved))
            if not keeps:
                del self.outbox[str(row[0])]

    @invariant()
    def is_as_the_model_says(self) -> None:
        """What runs and waits, and what was used, is known exactly; nothing leaves a window before its time."""
        for scope in scopes_of("k"):
            for kind in (REQUESTS, TOKENS, DAY):
                exact = self.model.counted(scope, kind, self.now, by_ms=True)
                assert exact <= self.model.counted(scope, kind, self.now)
        found = self.streams.content()
        state = found.get("state", {})
        for scope in ("", "k", "free"):
            assert int(state.get(f"running:{scope}", 0)) == self.model.running(scope)
            assert int(state.get(f"queued:{scope}", 0)) == self.model.queued(scope)
        kept: defaultdict[str, int] = defaultdict(int)
        for name, fields in found.items():
            if name.startswith("usage:d:"):
                for each, value in fields.items():
                    kept[each.partition("\n")[0]] += int(value)
        assert {name: value for name, value in self.usage.items() if value} == dict(kept)
        assert set(found.get("held", {})) == set(self.model.held)
        assert set(found.get("open", {})) == set(self.model.held)


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[Redis]:
    emptied(redis_server)
    with Redis(port=redis_server.port) as client:
        yield client


def test_any_order_of_requests_and_ends(client: Redis) -> None:
    machine = type("Bound", (Limits,), {"client": client, "streams": VirtualStreams(client)})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate,),
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.parametrize(("behind_ms", "is_refused"), [(0, True), (1000, True), (5000, True), (600_000, False)])
def test_a_clock_that_is_a_little_behind_forgets_nothing(client: Redis, behind_ms: int, is_refused: bool) -> None:
    """As that of the replica that took over; a clock that was set back begins the windows of a minute anew."""
    client.flushall()
    streams = VirtualStreams(client)

    def is_admitted(name: str, now: int) -> bool:
        bounds = ACCEPT_MS, 0, 128, KEPT_DAYS * 86_400_000
        arguments = name, "", 1, 10, 1, *bounds, 2, 20, 40, 0, 0, 0, 0, 0, 0, 0
        code: int = streams.run("limits/admit", arguments, now, RUN)[0]
        return bool(code)

    quarter = START_MS - START_MS % 900_000 + 900_000  # the day's window has a new slot here, too
    assert is_admitted("a", quarter)
    assert is_admitted("b", quarter)
    assert is_admitted("c", quarter - behind_ms) is not is_refused
    later = [is_admitted(f"{name}", quarter + 62_000 * (1 + name // 2)) for name in range(4)]
    assert sum(later) + 2 + (not is_refused) == 4, "no more than four count in the day"
