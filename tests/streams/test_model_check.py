"""The real scripts under lost replies, late scripts, lost writes, dead and paused engines and clock steps.

In order: the rules that each state and step must keep, written from the documents and not from the Lua; a model of
engines, gateways and time around the scripts; the stories that walks are made of; broken scripts, each of which the
check has to catch; the tests.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from pagestream_streams import EmbeddedRedis
from redis import Redis
from redis.exceptions import OutOfMemoryError, ResponseError
from support.protocol.virtual_streams import BELL, PREFIX, SCRIPTS, Content, Dump, VirtualStreams
from support.redis.servers import emptied

pytestmark = pytest.mark.served

LEASE, CONTROL, HOLE, STORM, PATIENCE, RETENTION, GRACE, SILENCE = 1000, 1500, 5000, 5000, 2000, 60_000, 1000, 700


class ViolationError(AssertionError):
    """An invariant doesn't hold."""


def must(holds: object, said: object) -> None:
    if not holds:
        raise ViolationError(said)


def chain(digest: str, body: str) -> str:
    return hashlib.sha1(f"{digest}:{body}".encode(), usedforsecurity=False).hexdigest()[:16]


def body(fields: dict[str, str]) -> str:
    if "t" in fields:
        return f"c:{fields['c']}:t:{fields['t']}"
    return f"c:{fields['c']}:f:{fields['f']}" if "f" in fields else f"end:{fields['end']}"


def requests(state: Content) -> dict[str, dict[str, str]]:
    return {key[4:]: record for key, record in state.items() if key.startswith("req:")}


def log(state: Content, request: str) -> list[dict[str, str]]:
    found: dict[str, Any] = state.get(f"log:{request}", {"rows": []})
    return [fields for _, fields in found["rows"]]


def waiting(state: Content) -> dict[str, list[str]]:
    """Return the place in which each request waits."""
    places: dict[str, list[str]] = {}
    for key, value in state.items():
        if key.startswith("queue:"):
            for entry, fields in value["rows"]:
                places.setdefault(fields["id"], []).append(f"{key[6:]} {entry}")
    for key in ("suspects", "verdicts"):
        for request in state.get(key, {}):
            places.setdefault(request, []).append(key)
    return places


def structure(state: Content) -> None:
    """Check the state: contiguous logs with one end, each request in one place, owners with leases, counts, times."""
    places, records = waiting(state), requests(state)
    for request, record in records.items():
        _log(state, request, record)
        _place(state, request, record, places.get(request, []))
        _readers(state, request, record)
    for request in places:
        must(request in records, f"{request} waits and has no record")
    for key, value in state.items():
        if key.startswith("queue:"):
            must(value["pending"] == 0, f"{key} keeps entries that were taken")
        if key.startswith("owned:"):
            must(key[6:] in state.get("leases", {}), f"{key} has no lease: it would never be reclaimed")
            for request in value:
                must(records.get(request, {}).get("owner") == key[6:], f"{key} has {request}, which another owns")
        if key.startswith("reads:"):
            must(key[6:] in state.get("gateways", {}), f"{key} has no lease: its graces would never start")
            for request in value:
                must(key[6:] in records.get(request, {}).get("readers", "").split(), f"{key} has {request}")
    _counts(state, records)


def _log(state: Content, request: str, record: dict[str, str]) -> None:
    entries, rows = log(state, request), state.get(f"log:{request}", {"rows": []})["rows"]
    must([row[0] for row in rows] == [f"{i + 1}-0" for i in range(len(rows))], f"{request}: log {rows}")
    must(int(record["next"]) == len(entries), f"{request}: next {record['next']} of {len(entries)}")
    digest = ""
    for fields in entries:
        digest = chain(digest, body(fields))
        must(fields["d"] == digest, f"{request}: digests don't chain")
    must(record["digest"] == digest, f"{request}: the record's digest is another")
    must(int(record["others"]) == sum("t" not in each for each in entries), f"{request}: others {record['others']}")
    ends = [i for i, fields in enumerate(entries) if "end" in fields]
    must(ends == ([len(entries) - 1] if record["state"] == "finished" else []), f"{request}: ends at {ends}")
    finishes = [fields["c"] for fields in entries if "f" in fields]
    must(len(set(finishes)) == len(finishes), f"{request}: a choice finished twice")
    if ends:
        must(len(finishes) == int(record["choices"]), f"{request}: ended with open choices")
        tokens = sum("t" in each for each in entries)
        must(entries[-1]["u"].split(",")[:2] == [record["ptok"], str(tokens)], f"{request}: usage {entries[-1]['u']}")
        must(record.get("reason") == entries[-1]["end"], f"{request}: another reason than its log's")


def _place(state: Content, request: str, record: dict[str, str], places: list[str]) -> None:
    owners = [key[6:] for key, value in state.items() if key.startswith("owned:") and request in value]
    match record["state"]:
        case "queued":
            must(len(places) == 1, f"{request} is queued in {places}")
            suspected = len(record.get("died_on", "").split()) >= 2 or "revived_from" in record
            must(places[0] != "suspects" or suspected, f"{request} is suspected for nothing")
            must(not owners and record["owner"] == "" and record["nonce"] == "", f"{request} is queued and owned")
            if " " in places[0]:
                must(places[0] == f"{record.get('queue')} {record.get('entry')}", f"{request}: not where it says")
        case "running":
            must(places == [] and owners == [record["owner"]], f"{request} runs; waits {places}, owned by {owners}")
        case _:
            must(places == [] and owners == [] and record["owner"] == "", f"{request} ended: {places} {owners}")
            must(f"req:{request}" in _expiring(state), f"{request} would be kept for ever")
            must(f"log:{request}" in _expiring(state), f"{request}'s log would be kept for ever")
    due = float(record["deadline"]) if record["state"] != "finished" and record["deadline"] != "0" else None
    must(state.get("deadlines", {}).get(request) == due, f"{request}: deadline")


def _expiring(state: Content) -> set[str]:
    return {key.split("}:")[-1] for key in state.get("expiries", {})}


def _readers(state: Content, request: str, record: dict[str, str]) -> None:
    readers = sorted(record["readers"].split())
    reading = sorted(key[6:] for key, value in state.items() if key.startswith("reads:") and request in value)
    must(readers == reading, f"{request}: readers {readers}, registered {reading}")
    unread = record["state"] != "finished" and not readers and record["continue"] == "0"
    must((request in state.get("graces", {})) == unread, f"{request}: grace and readers {readers}")


def _counts(state: Content, records: dict[str, dict[str, str]]) -> None:
    meta = state.get("meta", {})
    for name in meta.get("classes", "").split():
        rows = state.get(f"queue:{name}", {"rows": []})["rows"]
        total = sum(int(fields["t"]) for _, fields in rows)
        must(int(meta.get(f"tokens:{name}", 0)) == total, f"class {name}: tokens {meta} for {rows}")
        expected: dict[str, str] = {}
        tenants = {records[fields["id"]]["tenant"] for _, fields in rows if fields["id"] in records}
        for tenant in tenants:
            mine = [int(fields["t"]) for _, fields in rows if records[fields["id"]]["tenant"] == tenant]
            expected |= {f"r{tenant}": str(len(mine)), f"t{tenant}": str(sum(mine)), f"w{tenant}": "1"}
        must(state.get(f"tenants:{name}", {}) == expected, f"class {name}: shares")
        must(int(meta.get(f"weights:{name}", 0)) == len(tenants), f"class {name}: weights")


def died(record: dict[str, str]) -> bool:
    """Return whether the death of a request's engine counts: the request was in its running step."""
    begun = int(record["next"]) > int(record.get("from", record["next"]))
    return record.get("step") == "1" or (record.get("step", "") == "" and begun)


def after_death(before: dict[str, str], after: dict[str, str], engine: str, place: str) -> None:
    same = before.get("died_at") == before["next"]
    on = before.get("died_on", "").split() if same else []
    alone = before.get("died_alone", "").split() if same else []
    if died(before):
        on = [*on, engine]
        if before.get("alone") == "1" and before["next"] == before.get("from"):
            alone = [*alone, engine]
        must(after.get("died_at") == before["next"], "the death's index")
        must(after.get("died_on", "").split() == on and after.get("died_alone", "").split() == alone, "deaths")
        wanted = "verdicts" if len(alone) >= 2 else "suspects" if len(on) >= 2 else "resume"
    else:
        must(after.get("died_on") == before.get("died_on"), "a death outside the step counted")
        wanted = "suspects" if len(on) >= 2 else "resume"
    must(place.startswith(wanted), f"after its engine's death it is in {place}, not in {wanted}")


def steady(before: Content, after: Content) -> None:
    """Check a step: logs only grow, ends stay, and epochs rise by at most one."""
    old, new = requests(before), requests(after)
    for request, record in old.items():
        must(request in new, f"{request} is gone")
        entries = log(before, request)
        must(log(after, request)[: len(entries)] == entries, f"{request}: what was written has changed")
        if record["state"] == "finished":
            same = {key: value for key, value in new[request].items() if key != "revived_as"}
            must(same == {k: v for k, v in record.items() if k != "revived_as"}, f"{request} had ended and changed")
        must(int(new[request]["epoch"]) - int(record["epoch"]) in (0, 1), f"{request}: epoch")


# -- A model of engines, gateways and time around the protocol's scripts: operations and their expected results.


Op = tuple[Any, ...]
ENGINES, GATEWAYS = ("a", "b"), ("g", "h")
PRINTS = {"a": "x", "b": "y"}
MOST_REQUESTS = 3
OK, FENCED, CONFLICT, GAP, ENDED, MISSING = range(6)


@dataclass(frozen=True)
class Given:
    """A request as its client sends it."""

    tenant: str
    priority: int
    choices: int
    deadline_ms: int
    goes_on: int  # 1: also without readers


GIVEN = {"p": Given("t", 0, 1, 0, 0), "q": Given("u", 0, 2, 9000, 0), "r": Given("t", 1, 1, 0, 1)}
OTHERS = {"s": Given("t", 0, 1, 0, 0), "v": Given("w", 0, 1, 0, 1)}  # more than there is room for
ALL = GIVEN | OTHERS


@dataclass
class Held:
    """A claim as its engine remembers it. Tokens are kept until the end, so that a gap can be filled."""

    engine: str
    epoch: str
    nonce: str
    entries: list[tuple[str, ...]]
    acknowledged: int


@dataclass
class World:
    """The state outside of Redis, copied for each branch."""

    now: int = 1_000_000
    process: int = 1
    nonces: int = 0
    boots: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENGINES, 1))
    held: dict[str, dict[str, Held]] = field(default_factory=lambda: {name: {} for name in ENGINES})
    stale: list[tuple[str, Held]] = field(default_factory=list)
    unheard: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in ENGINES})
    retired: tuple[str, ...] = ()  # engines that finish requests begun with their fingerprint, and claim nothing else
    streams: dict[tuple[str, str], list[dict[str, str]]] = field(default_factory=dict)
    late: list[tuple[str, list[Any]]] = field(default_factory=list)
    full: bool = False  # whether Redis is at its memory limit

    def engine(self, name: str) -> str:
        return f"{name}:{self.boots[name]}"


class _RefusedError(Exception):
    """Redis is full, and refused a script that may be refused then."""


class Protocol:
    """A world and its Redis: one method `_<operation>` for each operation."""

    def __init__(self, client: Redis, broken: Mapping[str, str] | None = None) -> None:
        self.redis = VirtualStreams(client, broken)
        self.world = World()
        self.state: Content = self.redis.content()
        self.saved: list[Dump] = []
        self.twice = False
        self.keeps = True  # dumps for machine losses

    def do(self, op: Op) -> None:
        """Do one operation; ViolationError where it breaks a rule. An operation that isn't possible does nothing."""
        if self.keeps:
            self.saved = [*self.saved[-5:], self.redis.dump()]
        with suppress(_RefusedError):
            getattr(self, f"_{op[0]}")(*op[1:])
        structure(self.state)

    # -- how scripts run

    def call(self, name: str, *arguments: Any) -> Any:
        """Run a script. With `twice`, run it again as after a lost reply, and check that this changes nothing."""
        before, process, now = self.state, f"{self.world.process:x}", self.world.now
        try:
            first = reply = self.redis.run(name, arguments, now, process, full=self.world.full)
        except ResponseError as error:
            if not isinstance(error, OutOfMemoryError) and "OOM" not in str(error):  # the latter: before 7.0
                raise
            new = name == "accept" and arguments[0] not in requests(before)
            must(new or name in ("append", "mark", "revive"), f"a full Redis refused {name}")
            must(self.redis.content() == before, f"{name} was refused and changed something")
            raise _RefusedError from error
        self.state = self.redis.content()
        steady(before, self.state)
        self._fenced(name, arguments, before)
        if self.twice and name not in ("claim", "revive"):
            again = self.redis.run(name, arguments, now, process, full=self.world.full)
            state = self.redis.content()
            must(state == self.state, f"{name} ran twice and changed {difference(self.state, state)}")
            if name in ("append", "register", "gateway_heartbeat", "poll", "view", "registry"):
                must(again == reply, f"{name} ran twice and said {reply}, {again}")
        return first

    def _fenced(self, name: str, arguments: Sequence[Any], before: Content) -> None:
        for request, record in requests(self.state).items():
            grown = len(log(self.state, request)) > len(log(before, request))
            must(not grown or name in ("accept", "append", "end", "revive"), f"{name} wrote to the log of {request}")
            if grown and name == "append":
                (_, values), old = json.loads(arguments[1]), requests(before)[request]
                must(old["state"] == "running", f"{request}: appended while {old['state']}")
                must((values[1], values[2]) == (old["epoch"], old["nonce"]), f"{request}: written by a former owner")
            if grown or name not in ("claim", "accept", "revive"):
                moved = requests(before).get(request, {}).get("epoch") != record["epoch"]
                must(not moved or name in ("accept", "revive"), f"{name} raised the epoch of {request}")

    # -- gateways

    def _accept(self, gateway: str, request: str, bounded: int) -> None:
        given, before = ALL[request], self.state
        known = requests(before).get(request)
        if not bounded and (known or (gateway, request) not in self.world.streams):
            return
        reply = self.call("accept", *self._accept_arguments(gateway, request, bounded))
        if known is None:
            must((reply[0] == 1) == (not bounded or _room(before, given)), f"accept answered {reply}")
            must((reply[0] == 1) == (request in requests(self.state)), "accepted without a record")
        else:
            must(reply[0] == 2, f"accept of a known id answered {reply}")
        if reply[0] in (1, 2):
            record = requests(self.state)[request]
            if record["state"] != "finished":
                must(gateway in record["readers"].split(), f"{gateway} accepted {request} and doesn't read it")
                must(self.state["gateways"][gateway] == self.world.now + LEASE, "the accepting gateway's lease")
            if known is None:
                place = waiting(self.state)[request][0]
                must(place.startswith(f"{given.priority} " if bounded else "resume "), f"accepted into {place}")
            self.world.streams.setdefault((gateway, request), [])

    def _echo(self, gateway: str, request: str) -> None:
        """Accept a request that ends as it is accepted."""
        known = requests(self.state).get(request)
        reply = self.call("accept", *self._accept_arguments(gateway, request, 1), 0, 0, 1, RETENTION)
        must(reply[0] == (2 if known else 1), f"accept of an echo answered {reply}")
        record = requests(self.state)[request]
        if known is None:
            must((record["state"], record["reason"], record["readers"]) == ("finished", "length", ""), f"{record}")
            must(len(log(self.state, request)) == ALL[request].choices + 1, "an echo with more than its finishes")

    def _accept_arguments(self, gateway: str, request: str, bounded: int) -> list[Any]:
        given = ALL[request]
        numbers = given.deadline_ms, GRACE, given.goes_on, gateway, LEASE, MOST_REQUESTS, 100, BELL, 0, 1, 100, bounded
        return [request, f"spec-{request}", given.tenant, given.priority, 3, given.choices, *numbers]

    def _steal(self, gateway: str, request: str) -> None:
        """Accept, cancel, view and read another tenant's request id: all are refused."""
        if request not in requests(self.state):
            return
        before, arguments = self.state, self._accept_arguments(gateway, request, 1)
        arguments[2] = "thief"
        must(self.call("accept", *arguments) == [3], "accepted for another tenant")
        must(self.call("end", request, "thief", "cancelled", RETENTION, "", "", 10) == [0], "another tenant cancelled")
        must(self.call("register", request, "thief", gateway, LEASE) is None, "another tenant reads")
        must(self.call("view", request, "thief") is None, "another tenant looks")
        must(self.state == before, f"another tenant changed {difference(before, self.state)}")

    def _register(self, gateway: str, request: str) -> None:
        record = requests(self.state).get(request)
        reply = self.call("register", request, ALL[request].tenant if request in ALL else "t", gateway, LEASE)
        if record is None:
            must(reply is None, f"registered for nothing: {reply}")
            return
        left = max(1, int(record["deadline"]) - self.world.now) if int(record["deadline"]) else 0
        wanted = [int(record["next"]), int(record["state"] == "finished"), left]
        must(reply == wanted, f"register answered {reply}, not {wanted}")
        if record["state"] != "finished":
            must(gateway in requests(self.state)[request]["readers"].split(), f"{gateway} isn't registered")
            must(self.state["gateways"][gateway] == self.world.now + LEASE, "the reading gateway's lease")
        self.world.streams.setdefault((gateway, request), [])

    def _unregister(self, gateway: str, request: str) -> None:
        before = requests(self.state).get(request, {}).get("readers", "").split()
        graces = self.state.get("graces", {})
        self.call("unregister", gateway, request)
        self.world.streams.pop((gateway, request), None)
        after = requests(self.state).get(request)
        if after is not None:
            must(after["readers"].split() == [each for each in before if each != gateway], "unregistered another")
            if gateway in before and request in self.state.get("graces", {}):
                must(self.state["graces"][request] == self._full_grace(request), "a grace that isn't whole")
            elif gateway not in before:
                must(self.state.get("graces", {}) == graces, "a grace moved")

    def _full_grace(self, request: str) -> int:
        """Return when a grace that starts now ends: a dead gateway's clients need time to notice."""
        now, silent = self.world.now, int(requests(self.state)[request].get("silent", 0))
        return GRACE + (max(now, silent) if silent <= now + 600_000 else now)

    def _gateway_beat(self, gateway: str) -> None:
        reply = self.call("gateway_heartbeat", gateway, LEASE)
        must(self.state["gateways"][gateway] == self.world.now + LEASE, "the gateway's lease wasn't renewed")
        queued = len(waiting(self.state))
        must(reply == [len(self.state.get(f"reads:{gateway}", [])), queued], f"gateway_heartbeat answered {reply}")

    def _gateway_dies(self, gateway: str) -> None:
        for stream in [each for each in self.world.streams if each[0] == gateway]:
            del self.world.streams[stream]

    def _read(self, gateway: str, request: str) -> None:
        """Read on: what was seen is the beginning of the log, or the stream ends."""
        seen = self.world.streams.get((gateway, request))
        if seen is None:
            return
        entries = log(self.state, request)
        reply = self.call("poll", request)
        record = requests(self.state).get(request)
        ended = int(record is None or record["state"] == "finished")
        must(reply == [-1 if record is None else len(entries), ended], f"poll answered {reply}")
        if record is not None:
            view = self.call("view", request, record["tenant"])
            tokens = sum("t" in each for each in entries)
            must(view[1] == record["state"] and int(view[3]) == len(entries) and view[6] == tokens, f"view {view}")
        if len(entries) > len(seen):
            if [each["d"] for each in entries[: len(seen)]] != [each["d"] for each in seen]:
                del self.world.streams[gateway, request]  # DATA_LOSS
                return
            digest = seen[-1]["d"] if seen else ""
            for fields in entries[len(seen) :]:
                digest = chain(digest, body(fields))
                must(fields["d"] == digest, "a reader saw a mixture")
            seen += entries[len(seen) :]

    # -- engines

    def _claim(self, name: str, room: int, lost: bool) -> None:
        world, before, engine = self.world, self.state, self.world.engine(name)
        world.nonces += 1
        nonce, retired = f"n{world.nonces}", name in world.retired
        idle = int(not world.held[name] and not retired)
        if any(requests(before).get(request, {}).get("alone") == "1" for request in world.held[name]):
            return
        limits = 1000, 0, 1000, LEASE, 10_000, idle, PRINTS[name], PATIENCE, CONTROL, int(retired)
        front = self._front(engine, nonce, limits)
        before = self.state
        _, _, *rows = self.call("claim", engine, nonce, room, *limits)
        keys = [row[10] for row in rows if not row[7]]
        must(keys == sorted(keys), f"claimed out of order: {keys}")
        must(not keys or keys[0] == front, f"{front} was named as the next one, and {keys} were claimed")
        records, after = requests(before), requests(self.state)
        must(len(rows) <= room, "claimed more than asked for")
        running = {
            request for request, record in after.items() if record["owner"] == engine and record["nonce"] == nonce
        }
        must(running == {row[0] for row in rows}, "the reply and the records differ")
        if rows:
            must(self.state["leases"][engine] == world.now + LEASE, "the claiming engine's lease")
        for request, spec, epoch, following, digest, attempts, _, alone, _, waited_ms, _ in rows:
            old, new, [place] = records[request], after[request], waiting(before)[request]
            must(old["state"] == "queued" and new["state"] == "running", f"claimed {request}, which is {old['state']}")
            must(epoch == int(old["epoch"]) + 1 == int(new["epoch"]), f"{request}: epoch {epoch} after {old['epoch']}")
            must(attempts == int(old["attempts"]) + 1 and spec == old["spec"], f"{request}: attempts {attempts}")
            must((following, digest) == (old["next"], old["digest"]), f"{request}: claimed at {following}")
            must(new["from"] == old["next"] and new["step"] == "", f"{request}: marks of an earlier claim")
            must(
                bool(alone) == (place == "suspects") == (new["alone"] == "1"), f"{request}: alone {alone} from {place}"
            )
            must(not alone or (len(rows) == 1 and idle), f"{request}: a suspect isn't alone")
            must(not alone or _control_over(before, world.now), f"{request}: a suspect runs in the control time")
            its_kind = place.startswith(f"resume:{PRINTS[name]} ")
            must(its_kind or not retired, f"{request}: an engine that ends took it from {place}")
            since = before["suspects"][request] if alone else int(place.split()[1].split("-")[0])
            waited = world.now - since if world.now >= since else PATIENCE
            must(waited_ms == max(0, world.now - since), f"{request}: reported to have waited {waited_ms} ms")
            must(self._may_run(name, old, waited), f"{request}: goes on by other numbers")
            must(new["print"] == PRINTS[name], f"{request}: whose numbers?")
            if not lost:
                entries = [_values(fields) for fields in log(self.state, request)]
                world.held[name][request] = Held(engine, str(epoch), nonce, entries, len(entries))
        self._in_order(before, rows, room, name)

    def _front(self, engine: str, nonce: str, limits: Sequence[Any]) -> int | None:
        """Ask for the key of the next request; check that this, and a claim bounded below it, takes nothing."""
        before = _but_for_empty_queues(self.state)
        [_, [_, _, _, _, *heads]] = self.call("claim", engine, nonce, 0, *limits)
        front: int | None = heads[0] if heads else None
        if front is not None and not limits[5]:
            self.call("claim", engine, nonce, 4, *limits, 0, 1, front - 1)
        after = _but_for_empty_queues(self.state)
        must(after == before, f"a question changed {difference(before, after)}")
        return front

    def _in_order(self, before: Content, rows: Sequence[Any], room: int, name: str) -> None:
        if [row for row in rows if row[7]]:
            return
        heads = [place.split() for places in waiting(before).values() for place in places if " " in place]
        retired = name in self.world.retired
        mine = [at for at in heads if at[0] == f"resume:{PRINTS[name]}" or (at[0] == "resume" and not retired)]
        classes = [at for at in heads if at[0].isdigit() and not retired]
        must(len(rows) >= min(room, len(mine) + len(classes)), f"claimed {len(rows)} of {heads}")
        if len(rows) == 1 and room == 1 and classes and not mine:
            [place] = waiting(before)[rows[0][0]]
            if not place.startswith("resume"):
                arrivals = {at[0]: min(int(x[1].split("-")[0]) for x in classes if x[0] == at[0]) for at in classes}
                virtual = {each: arrival + 1000 * int(each) for each, arrival in arrivals.items()}
                must(virtual[place.split()[0]] == min(virtual.values()), f"claimed {place} before its turn")
        if len(rows) == 1 and room == 1 and mine:
            must(waiting(before)[rows[0][0]][0].startswith("resume"), "a new one went before one that was begun")

    def _append(self, name: str, request: str, what: str, how: str) -> None:
        held = self.world.held[name].get(request)
        if held is not None:
            self._write(held, request, what, how)

    def _stale_append(self, place: int, what: str) -> None:
        if self.world.stale:
            request, held = self.world.stale[place % len(self.world.stale)]
            self._write(held, request, what, "")

    def _write(self, held: Held, request: str, what: str, how: str) -> None:
        given = ALL.get(request, ALL["p"])
        _extend(held, given.choices, what)
        first = max(0, held.acknowledged - (how == "again")) + (how == "gap")
        entries = held.entries[first:]
        if not entries:
            return
        arguments = _append_arguments(request, held, first, entries)
        if how == "late":
            self.world.late = [*self.world.late[-3:], ("append", arguments)]
            return
        if how == "other" and held.acknowledged and held.entries[held.acknowledged - 1][0] == "t":
            entries = _others(held)
            first = held.acknowledged - 1
            arguments = _append_arguments(request, held, first, entries)
        old, before = requests(self.state).get(request), log(self.state, request)
        others, _ = self.call("append", *arguments)
        outcome, following = others[1:] if others else (OK, first + len(entries))
        must(outcome == _expected(old, before, held, first, entries), f"append answered {outcome} at {first}: {old}")
        must(following == len(log(self.state, request)), f"append returned {following}")
        if outcome == OK:
            written = [_values(fields) for fields in log(self.state, request)]
            must(written[first : first + len(entries)] == entries, "acknowledged what the log hasn't")
        if how not in ("lost", "other") or outcome not in (OK, GAP):
            self._settle(held, request, outcome, following, first + len(entries))

    def _settle(self, held: Held, request: str, outcome: int, following: int, sent: int) -> None:
        if outcome == OK:
            held.acknowledged = sent
        elif outcome == GAP:
            held.acknowledged = following
        if outcome not in (OK, GAP) or held.entries[sent - 1][0] == "e":
            for claims in self.world.held.values():
                if claims.get(request) is held:
                    self._drop(claims, request)

    def _drop(self, claims: dict[str, Held], request: str) -> None:
        self.world.stale = [*self.world.stale[-3:], (request, claims.pop(request))]

    def _mark(self, name: str, request: str, step: str, how: str) -> None:
        held = self.world.held[name].get(request)
        if held is None:
            return
        arguments = [request, held.epoch, held.nonce, step]
        if how == "late":
            self.world.late = [*self.world.late[-3:], ("mark", arguments)]
            return
        self._marked(arguments)

    def _marked(self, arguments: list[Any]) -> None:
        request, epoch, nonce, step = arguments
        before = self.state
        self.call("mark", *arguments)
        old = requests(before).get(request, {})
        if (old.get("state"), old.get("epoch"), old.get("nonce")) == ("running", epoch, nonce):
            must(requests(self.state)[request]["step"] == step, "the mark wasn't kept")
        else:
            must(self.state == before, "a mark of a former owner was kept")

    def _stale_mark(self, place: int) -> None:
        if self.world.stale:
            request, held = self.world.stale[place % len(self.world.stale)]
            self._marked([request, held.epoch, held.nonce, "1"])

    def _hand_back(self, name: str, request: str, how: str) -> None:
        held = self.world.held[name].get(request)
        if held is None:
            return
        self._drop(self.world.held[name], request)
        arguments = [held.engine, BELL, 0, "stop", CONTROL, request, held.epoch, held.nonce]
        if how == "late":
            self.world.late = [*self.world.late[-3:], ("hand_back", arguments)]
            return
        self._handed_back(arguments)

    def _handed_back(self, arguments: list[Any]) -> None:
        engine, _, _, why, _, request, epoch, nonce = arguments
        before = self.state
        reply = self.call("hand_back", *arguments)
        old, new = requests(before).get(request, {}), requests(self.state).get(request, {})
        fence = nonce in ("", old.get("nonce")) and epoch in ("", old.get("epoch"))
        mine = old.get("state") == "running" and old.get("owner") == engine and fence
        must(reply == ([request] if mine else []), f"hand_back answered {reply}")
        if not mine:
            must(old == new, "a hand-back moved another's request")
            return
        must(new["state"] == "queued", "it wasn't handed back")
        [place] = waiting(self.state)[request]
        if why == "failed":
            after_death(old, new, engine, place)
        else:
            must(new.get("died_on") == old.get("died_on"), "a hand-back counted as a death")
            began = old["next"] != "0"
            suspect = old.get("died_at") == old["next"] and len(old.get("died_on", "").split()) >= 2
            print_ = f"resume:{old['print']} " if began else "resume "
            must(place.startswith("suspects" if suspect else print_), f"handed back to {place}")

    def _give_unknown(self, name: str, request: str) -> None:
        """Hand back what a heartbeat showed as owned and not held; by now it may be another engine's."""
        held = self.world.held[name].get(request)
        if held is None:
            self._handed_back([self.world.engine(name), BELL, 0, "stop", CONTROL, request, "", ""])

    def _fail(self, name: str, request: str) -> None:
        """Fail in the running step, and hand everything back."""
        held = self.world.held[name].get(request)
        if held is not None:
            self._drop(self.world.held[name], request)
            self._handed_back([held.engine, BELL, 0, "failed", CONTROL, request, held.epoch, held.nonce])
            must(_noted(self.state, held.engine), "its death wasn't noted")

    def _crash(self, name: str, expired: bool) -> None:
        world, engine, before = self.world, self.world.engine(name), self.state
        for request in list(world.held[name]):
            self._drop(world.held[name], request)
        world.boots[name] += 1
        world.unheard[name] = []
        self._begin_anew(name)
        if not expired:
            return
        leased = engine in before.get("leases", {})
        self.call("expire", name, BELL, 0, CONTROL)
        self._reclaimed(before, {each for each in before.get("leases", {}) if each.split(":")[0] == name})
        must(not leased or _noted(self.state, engine), "a death wasn't noted")
        must(engine not in self.state.get("leases", {}), "a dead engine has a lease")

    def _reclaimed(self, before: Content, dead: set[str]) -> None:
        for request, old in requests(before).items():
            new = requests(self.state)[request]
            if old["state"] == "running" and old["owner"] in dead:
                must(new["state"] == "queued", f"{request} wasn't reclaimed from {old['owner']}")
                after_death(old, new, old["owner"], waiting(self.state)[request][0])
            elif old["state"] == "running":
                kept = all(new[each] == old[each] for each in ("state", "owner", "epoch", "nonce"))
                must(kept, f"{request} was taken from {old['owner']}, which lives")

    def _beat(self, name: str, can: int) -> None:
        world, engine, before = self.world, self.world.engine(name), self.state
        retired = name in world.retired
        registered = self.call("registry", "" if retired else engine, LEASE)
        must(engine in registered or retired, "a living engine isn't registered")
        listed = before.get("ps:engines:test/model", {}).get(engine, 0)  # Redis may have lost that it left
        must(not retired or listed in (0, self._listed(engine)), "an engine that ends renewed its place")
        living = {each for each, until in self.state["ps:engines:test/model"].items() if until > world.now}
        must(set(registered) == living, f"registry answered {registered}")
        owned, wanted, now = self.call("heartbeat", engine, LEASE, can, 500, CONTROL, PRINTS[name], PATIENCE)
        must(self.state["leases"][engine] == world.now + LEASE, "the lease wasn't renewed")
        must(sorted(owned) == self.state.get(f"owned:{engine}", []), f"heartbeat answered {owned}")
        must(now == world.now, f"heartbeat answered the time {now}")
        for request, record in requests(self.state).items():
            if f"lapsed:{engine}" in before and request in before[f"lapsed:{engine}"] and record["state"] != "finished":
                must(engine not in record.get("died_on", "").split(), "a living engine's death still counts")
        must(not _noted(self.state, engine), "a living engine counts as dead")
        waited = [
            world.now - since
            for request, since in self.state.get("suspects", {}).items()
            if since <= world.now and self._may_run(name, requests(self.state)[request], world.now - since)
        ]
        runnable = bool(waited) and _control_over(self.state, world.now)
        must((wanted > 0) == runnable, f"heartbeat wants {wanted} of {waited}")
        must(wanted < 2 or before.get("vacating", engine) == engine, "two engines were chosen")
        must(
            wanted == 2 or not (runnable and can and max(waited) >= 500) or "vacating" in before, "no engine was chosen"
        )
        held = world.held[name]
        for request in [each for each in held if each not in owned]:
            self._drop(held, request)
        unknown = [request for request in owned if request not in held]
        for request in [each for each in unknown if each in world.unheard[name]]:
            self._handed_back([engine, BELL, 0, "stop", CONTROL, request, "", ""])
        world.unheard[name] = unknown

    def _may_run(self, name: str, record: Mapping[str, Any], waited: float) -> bool:
        printed = record.get("print", "") if int(record["next"]) else ""
        return printed in ("", PRINTS[name]) or waited >= PATIENCE

    def _listed(self, engine: str) -> float:
        until: float = self.state.get("ps:engines:test/model", {}).get(engine, 0)
        return until

    def _leave(self, name: str) -> None:
        for request in list(self.world.held[name]):
            self._hand_back(name, request, "")
        engine = self.world.engine(name)
        before, owns = self.state.get("leases", {}), f"owned:{engine}" in self.state
        self.call("leave", engine)
        after = self.state.get("leases", {})
        must(after == {each: until for each, until in before.items() if each != engine or owns}, "leases after leaving")
        must(not _noted(self.state, engine) or _noted({"deaths": self.state["deaths"]}, engine), "left as a death")
        self.world.boots[name] += 1
        self.world.unheard[name] = []
        self._begin_anew(name)

    def _begin_anew(self, name: str) -> None:
        self.world.retired = tuple(each for each in self.world.retired if each != name)

    def _retire(self, name: str) -> None:
        """Retire an engine. Where others live (with another fingerprint) it finishes begun requests."""
        world, engine = self.world, self.world.engine(name)
        self.redis.unlist(engine)
        self.state = self.redis.content()
        living = self.call("registry", "", LEASE)
        must(engine not in living, "an engine that ends is registered")
        if not living:
            self._leave(name)
            return
        world.retired = tuple(sorted({*world.retired, name}))
        for request in [each for each, held in world.held[name].items() if not held.entries]:
            self._hand_back(name, request, "")

    # -- what others and time do

    def _cancel(self, request: str) -> None:
        before, record = self.state, requests(self.state).get(request)
        tenant = ALL[request].tenant if request in ALL else ""
        reply = self.call("end", request, tenant, "cancelled", RETENTION, "", "", 10)
        if record is None:
            must(reply == [0] and self.state == before, f"cancelled nothing: {reply}")
            return
        must(reply[0] == (2 if record["state"] == "finished" else 1), f"cancel answered {reply}")
        must(requests(self.state)[request]["state"] == "finished", "cancelled and not finished")

    def _end_due(self, condition: str, request: str) -> None:
        """End what a sweep named, perhaps late: only what is due now ends."""
        record, due = requests(self.state).get(request), self.state.get(condition, {}).get(request)
        reply = self.call("end", request, "", "error", RETENTION, condition, "quarantined\0it kills", 10)
        if record is None or record["state"] == "finished":
            return
        must((reply[0] == 1) == (due is not None and due <= self.world.now), f"ended by {condition}: {reply}, {due}")
        if reply[0] == 1 and condition == "verdicts":
            must(len(record.get("died_alone", "").split()) >= 2, "quarantined too early")
            rows = self.state.get("dead", {"rows": []})["rows"]
            must(rows and rows[-1][1]["id"] == request, "quarantined and not listed")
            must(requests(self.state)[request].get("dead_index") == record["next"], "quarantined at another index")

    def _sweep(self) -> None:
        world, before = self.world, self.state
        meta, leases = before.get("meta", {}), before.get("leases", {})
        swept = int(meta.get("swept", 0))
        hole = not swept or world.now - swept > HOLE or world.now < swept or meta["run_id"] != f"{world.process:x}"
        arguments = 100, HOLE, LEASE, LEASE, 64, CONTROL, STORM, SILENCE
        _, late, abandoned, restarted, poison, busy, _ = self.call("sweep", *arguments)
        early = not hole and world.now - swept < 100
        must(restarted == int(hole), f"sweep answered restarted {restarted}")
        unfinished = [each for each, record in requests(self.state).items() if record["state"] != "finished"]
        must(busy == 1 or not unfinished, f"nothing is to be swept for {unfinished}")
        must(sorted(self.call("forget", 100)) == sorted(unfinished), "requests that are unfinished")
        dead = set() if hole or early else {each for each, until in leases.items() if until <= world.now}
        self._reclaimed(before, dead)
        must(all(_noted(self.state, each) for each in dead), "a lapse wasn't noted")
        for request, old in requests(before).items():
            if old["owner"] in dead and died(old):
                lapsed = self.state.get(f"lapsed:{old['owner']}", [])
                must(request in lapsed, f"{old['owner']} couldn't take back its death with {request}")
        if early:
            must(self.state == before, "swept twice")
            return
        if hole:
            wanted = dict.fromkeys(leases, world.now + LEASE)
            must(self.state.get("leases", {}) == wanted, "a lease didn't start anew after an outage")
            for request, until in self.state.get("graces", {}).items():
                must(until == self._full_grace(request), f"the grace of {request} didn't start anew after an outage")
        else:
            must(not dead & set(self.state.get("leases", {})), "a lapsed lease stays")
        gone = set() if hole else {each for each, until in before.get("gateways", {}).items() if until <= world.now}
        must(not gone & set(self.state.get("gateways", {})), "a dead gateway stays")
        for key in self.state:
            must(not key.startswith("reads:") or key[6:] not in gone, "a dead gateway reads")
        for request in self.state.get("graces", {}).keys() - before.get("graces", {}).keys():
            full = world.now + GRACE + SILENCE
            must(self.state["graces"][request] == full, f"{request}: its client had no time to notice")
        for request, old in requests(before).items():
            if old["state"] != "finished" and gone & set(old.get("readers", "").split()):
                silent = int(requests(self.state)[request]["silent"])
                must(silent == world.now + SILENCE, f"{request}: no record that its gateway fell silent")
        must(
            set(late) == {each for each, at in self.state.get("deadlines", {}).items() if at <= world.now}, "deadlines"
        )
        served = "gateways" in self.state and not world.full
        due = {each for each, at in self.state.get("graces", {}).items() if at <= world.now}
        must(set(abandoned) == (due if served else set()), f"abandoned {abandoned} of {due}")
        must(("deserted" in self.state["meta"]) == (world.full or "gateways" not in self.state), "deserted")
        if "deserted" in meta and served and not hole:
            length = world.now - int(meta["deserted"])
            for request, until in self.state.get("graces", {}).items():
                whole = self._full_grace(request)
                wanted = min(whole, before.get("graces", {}).get(request, whole) + length)
                must(until == wanted, f"the grace of {request} ran on, or began anew")
        for request, _, _ in poison:
            self._is_poison(before, request)
        if "verdicts" in self.state and _control_over(self.state, world.now):
            left = {each for each, at in self.state["verdicts"].items() if at <= world.now}
            must(left == {row[0] for row in poison}, "due verdicts and requests to quarantine differ")

    def _is_poison(self, before: Content, request: str) -> None:
        record = requests(self.state)[request]
        had = {*record.get("died_on", "").split(), *record.get("died_near", "").split()}
        since = min(float(record["died_first"]), self.world.now - STORM)
        others = {each for each, at in self.state.get("deaths", {}).items() if at >= since and each[0] != "!"} - had
        must(not others, f"{request} was condemned in a storm: {others}")
        must(len(record.get("died_alone", "").split()) >= 2, f"{request} was condemned too early")

    def _tick(self, length: int) -> None:
        self.world.now += length
        self.redis.expire(self.world.now)
        self.state = self.redis.content()

    def _fill(self, full: int) -> None:
        self.world.full = bool(full)

    def _clock_back(self) -> None:
        self.world.now -= 3000

    def _lose(self, writes: int) -> None:
        """Restart Redis without its last writes; engines and gateways keep their state."""
        if self.saved:
            self.redis.restore(self.saved[-min(writes, len(self.saved))])
            self.saved = []
            self.world.process += 1
            self.state = self.redis.content()

    def _deliver(self, place: int) -> None:
        """Run a script whose caller has given up."""
        if not self.world.late:
            return
        name, arguments = self.world.late.pop(place % len(self.world.late))
        if name == "mark":
            self._marked(arguments)
        elif name == "hand_back":
            self._handed_back(arguments)
        else:
            self.call(name, *arguments)

    def _revive(self, request: str) -> None:
        new, before = f"{request}{self.world.nonces}", requests(self.state).get(request, {})
        self.world.nonces += 1
        arguments = new, f"spec-{new}", 0, GRACE, 1, BELL, 0
        made, content = self.call("revive", request, *arguments), self.state
        if "dead" not in before:
            must(made is None, "revived what wasn't quarantined")
            return
        [reply] = made
        record, index = requests(content)[reply], int(before["dead_index"])
        must(reply == before.get("revived_as", new), "revived twice")
        if reply == new:
            must(log(content, reply) == log(content, request)[:index], "revived with another log")
            must(waiting(content)[reply] == ["suspects"] and record["tenant"] == before["tenant"], "revived elsewhere")
        must(self.call("revive", request, "other", *arguments[1:]) == made, "a retry of revive made another")


def _extend(held: Held, choices: int, what: str) -> None:
    entries = held.entries
    if entries and entries[-1][0] == "e":
        return
    finished = {entry[1] for entry in entries if entry[0] == "f"}
    opened = [str(choice) for choice in range(choices) if str(choice) not in finished]

    def add(kind: str, choice: str, value: str, text: str, said: str) -> None:
        digest = chain(entries[-1][4] if entries else "", said)
        entries.append((kind, choice, value, text, digest, ""))

    if what in ("1", "2") and opened:
        add("t", opened[0], what, "x", f"c:{opened[0]}:t:{what}")
    elif what == "finish" and len(opened) > 1:
        add("f", opened[0], "stop", "", f"c:{opened[0]}:f:stop")
    elif what == "end":
        for choice in opened:
            add("f", choice, "stop", "", f"c:{choice}:f:stop")
        add("e", "", "stop", f"3,{sum(entry[0] == 't' for entry in entries)},0", "end:stop")


def _others(held: Held) -> list[tuple[str, ...]]:
    """Return entries with another token in place of the last acknowledged one."""
    place = held.acknowledged - 1
    kind, choice, _, text, _, extra = held.entries[place]
    digest = chain(held.entries[place - 1][4] if place else "", f"c:{choice}:t:9")
    return [(kind, choice, "9", text, digest, extra)]


def _but_for_empty_queues(state: Content) -> Content:
    """Leave out what a claim tidies up on its way: empty queues of begun requests, and their names in meta."""
    empty = {key for key, value in state.items() if key.startswith("queue:resume:") and not value["rows"]}
    return {key: value for key, value in state.items() if key not in empty | {"meta"}}


def _values(fields: dict[str, str]) -> tuple[str, ...]:
    if "t" in fields:
        return "t", fields["c"], fields["t"], fields["x"], fields["d"], ""
    if "f" in fields:
        return "f", fields["c"], fields["f"], fields.get("x", ""), fields["d"], fields.get("s", "")
    return "e", "", fields["end"], fields["u"], fields["d"], fields["m"]


def _append_arguments(request: str, held: Held, first: int, entries: Sequence[tuple[str, ...]]) -> list[Any]:
    wake_up = b"wake"
    values = [
        request,
        held.epoch,
        held.nonce,
        first,
        "",
        len(entries),
        len(wake_up),
        *(value for each in entries for value in each),
    ]
    return [RETENTION, json.dumps([PREFIX, values]), "ps:gateway:", wake_up]


def _expected(
    old: dict[str, str] | None, logged: list[dict[str, str]], held: Held, first: int, entries: list[tuple[str, ...]]
) -> int:
    if old is None:
        return MISSING
    there = [fields["d"] for fields in logged[first : first + len(entries)]]
    equal = there == [entry[4] for entry in entries[: len(there)]]
    if old["state"] == "finished":
        return OK if equal and len(there) == len(entries) else ENDED
    if old["state"] != "running" or (old["epoch"], old["nonce"]) != (held.epoch, held.nonce):
        return FENCED
    if first > len(logged):
        return GAP
    return OK if equal else CONFLICT


def _room(state: Content, given: Given) -> bool:
    rows = state.get(f"queue:{given.priority}", {"rows": []})["rows"]
    tenants = [requests(state)[fields["id"]]["tenant"] for _, fields in rows]
    mine, others = tenants.count(given.tenant), len({*tenants} - {given.tenant})
    return len(rows) < MOST_REQUESTS and (mine == 0 or mine + 1 <= max(1, MOST_REQUESTS // (1 + others)))


def _noted(state: Content, engine: str) -> bool:
    return engine in state.get("deaths", {}) or f"!{engine}" in state.get("deaths", {})


def _control_over(state: Content, now: int) -> bool:
    meta = state.get("meta", {})
    if "up" not in meta:
        return False
    if "alone_died" not in meta:
        return True
    since = max(int(meta["up"]), int(meta["alone_died"]))
    return now < since or now - since >= CONTROL


def difference(before: Content, after: Content) -> dict[str, Any]:
    return {key: (before.get(key), after.get(key)) for key in {*before, *after} if before.get(key) != after.get(key)}


# -- which operations happen


def anything(chance: random.Random) -> Op:
    engine, gateway, request = chance.choice(ENGINES), chance.choice(GATEWAYS), chance.choice(list(ALL))
    how = chance.choice(["", "", "", "lost", "late", "again", "gap", "other"])
    later = chance.choice(["", "", "late"])
    what = chance.choice(["1", "1", "2", "finish", "end"])
    return chance.choice(
        [
            ("accept", gateway, request, 1),
            ("accept", gateway, request, chance.choice([0, 1])),
            ("steal", gateway, request),
            ("register", gateway, request),
            ("unregister", gateway, request),
            ("gateway_beat", gateway),
            ("gateway_dies", gateway),
            ("read", gateway, request),
            ("claim", engine, chance.choice([1, 4]), chance.random() < 0.15),
            ("claim", engine, chance.choice([1, 4]), False),
            ("append", engine, request, what, how),
            ("append", engine, request, "1", ""),
            ("append", engine, request, "1", how),
            ("stale_append", chance.randrange(4), what),
            ("mark", engine, request, chance.choice(["0", "1"]), later),
            ("stale_mark", chance.randrange(4)),
            ("hand_back", engine, request, later),
            ("give_unknown", engine, request),
            ("fail", engine, request),
            ("crash", engine, chance.random() < 0.7),
            ("beat", engine, chance.choice([0, 1])),
            ("beat", engine, chance.choice([0, 1])),
            ("leave", engine),
            ("retire", engine),
            ("cancel", request),
            ("end_due", chance.choice(["deadlines", "graces", "verdicts"]), request),
            ("sweep",),
            ("sweep",),
            ("tick", chance.choice([50, 150, 600, 1200, 2500, 6000])),
            ("clock_back",),
            ("lose", chance.randrange(1, 6)),
            ("deliver", chance.randrange(4)),
            ("revive", request),
        ]
    )


def poison(chance: random.Random) -> Iterator[Op]:
    """One request kills its engines until its verdict is due."""
    request = chance.choice(list(GIVEN))
    yield ("accept", "g", request, 1)
    begun = chance.random() < 0.5
    for death in range(4):
        yield ("beat", "a", 1)
        yield ("tick", 1600)
        yield ("sweep",)
        yield ("gateway_beat", "g")
        yield ("beat", "a", 1)
        yield ("claim", "a", 1, False)
        yield ("mark", "a", request, "1", "")
        if begun and not death:
            yield ("append", "a", request, "1", "")
            yield ("append", "a", request, "finish", "")
        if death == 2:
            yield ("beat", "b", 1)
        yield chance.choice([("crash", "a", True), ("fail", "a", request)])
    yield ("beat", "b", 0)
    for _ in range(3):
        yield ("tick", 900)
        yield ("beat", "b", 0)
        yield ("gateway_beat", "g")
        yield ("sweep",)
    yield ("end_due", "verdicts", request)
    yield ("revive", request)
    yield ("claim", "b", 1, False)


def paused(chance: random.Random) -> Iterator[Op]:
    """An engine that is stopped past its lease and resumes; gateways that die and return."""
    request = chance.choice(list(GIVEN))
    yield from [("accept", "g", request, 1), ("beat", "a", 0), ("sweep",), ("claim", "a", 4, False)]
    yield from [("mark", "a", request, "1", ""), ("append", "a", request, "1", ""), ("beat", "b", 0)]
    yield from [("tick", 1200), ("beat", "b", 0), ("sweep",), ("claim", "b", 4, False), ("tick", 2500)]
    yield from [("sweep",), ("claim", "b", 4, False), ("append", "a", request, "2", ""), ("beat", "a", 0)]
    yield from [("append", "b", request, "1", ""), ("gateway_beat", "h"), ("sweep",), ("tick", 1200), ("sweep",)]
    yield from [("register", "g", request), ("unregister", "g", request), ("gateway_beat", "h"), ("tick", 150)]
    yield from [("sweep",), ("end_due", "graces", request)]


def generated(chance: random.Random) -> Iterator[Op]:
    """Appends in every form, an end with an open choice, and bounds."""
    yield from [("accept", "g", each, 1) for each in ("p", "s", "q", "v")]
    yield from [("cancel", "s"), ("accept", "h", "s", 1), ("accept", "g", "s", 1), ("claim", "a", 4, False)]
    yield from [
        ("append", "a", "q", "1", ""),
        ("append", "a", "q", "2", "again"),
        ("append", "a", "q", "1", "late"),
        ("append", "a", "q", "1", "gap"),
    ]
    yield from [("append", "a", "q", "finish", ""), ("append", "a", "p", "1", ""), ("append", "a", "p", "1", "other")]
    yield from [("cancel", "q"), ("append", "a", "q", "1", ""), ("cancel", "p"), ("accept", "g", "r", 1)]
    yield from [("claim", "b", 4, False), ("append", "b", "r", "1", ""), ("append", "b", "r", "end", "lost")]
    yield from [("append", "b", "r", "end", ""), ("accept", "g", "p", 1), ("read", "g", "q"), ("cancel", "r")]


def mislaid(chance: random.Random) -> Iterator[Op]:
    """Redis loses a request; a hand-back arrives after its engine has claimed the same request again."""
    yield from [
        ("accept", "g", "p", 1),
        ("lose", 2),
        ("accept", "g", "p", 0),
        ("beat", "a", 1),
        ("claim", "a", 1, False),
    ]
    yield from [("hand_back", "a", "p", "late"), ("beat", "a", 0), ("beat", "a", 0), ("claim", "a", 1, False)]
    yield from [("deliver", 0), ("give_unknown", "b", "p"), ("mark", "a", "p", "1", ""), ("leave", "a")]
    yield from [("claim", "a", 1, False), ("mark", "a", "p", "1", ""), ("crash", "a", True), ("claim", "a", 1, False)]
    yield from [("append", "a", "p", "1", ""), ("mark", "a", "p", "1", ""), ("crash", "a", True)]
    yield from [("claim", "b", 1, True), ("leave", "b")]


def stopped(chance: random.Random) -> Iterator[Op]:
    """Two engines are stopped with the same request in turn; it is a suspect until the first resumes."""
    yield from [("accept", "g", "r", 1), ("sweep",), ("claim", "a", 1, False), ("mark", "a", "r", "1", "")]
    yield from [("tick", 1200), ("sweep",), ("claim", "b", 1, False), ("mark", "b", "r", "1", ""), ("tick", 1200)]
    yield from [("sweep",), ("tick", 600), ("beat", "b", 0), ("tick", 600)]
    yield from [("beat", "a", 0), ("claim", "a", 1, False), ("claim", "b", 1, False)]


def sought(chance: random.Random) -> Iterator[Op]:
    """A suspect waits while two engines are busy: one of them is chosen to hand back all it holds."""
    yield ("accept", "g", "r", 1)
    for _ in range(2):
        yield from [("claim", "a", 1, False), ("mark", "a", "r", "1", ""), ("crash", "a", True)]
    yield from [("accept", "g", "p", 1), ("accept", "g", "q", 1), ("beat", "a", 0), ("tick", 600)]
    yield from [("beat", "a", 1), ("beat", "b", 1), ("claim", "b", 1, False), ("claim", "b", 1, False)]


def reissued(chance: random.Random) -> Iterator[Op]:
    """An epoch is issued twice, since Redis lost the first claim; what was begun moves on."""
    yield from [("accept", "g", "p", 1), ("claim", "a", 1, False), ("lose", 2), ("claim", "b", 1, False)]
    yield from [("append", "a", "p", "1", ""), ("stale_append", 0, "1"), ("append", "b", "p", "1", "")]
    yield from [("hand_back", "b", "p", ""), ("claim", "b", 1, False), ("append", "b", "p", "1", "")]
    yield from [("mark", "b", "p", "0", ""), ("sweep",), ("tick", 1200), ("sweep",)]


def replaced(chance: random.Random) -> Iterator[Op]:
    """An engine retires while the other has another fingerprint: it finishes only requests begun with its own."""
    yield from [("accept", "g", "p", 1), ("beat", "a", 0), ("beat", "b", 0), ("claim", "a", 4, False)]
    yield from [("append", "a", "p", "1", ""), chance.choice([("hand_back", "a", "p", ""), ("crash", "a", True)])]
    yield from [("accept", "g", "q", 1), ("accept", "h", "r", 1), ("claim", "b", 1, False), ("retire", "a")]
    yield from [("claim", "a", 4, False), ("beat", "a", 1), ("append", "a", "p", "2", ""), ("claim", "b", 4, False)]
    yield from [("append", "b", "q", "1", ""), ("hand_back", "b", "q", ""), ("claim", "a", 4, False)]
    yield from [("tick", 150), ("sweep",), chance.choice([("append", "a", "p", "end", ""), ("leave", "a")])]
    yield from [("claim", "b", 4, False), ("leave", "a"), ("claim", "a", 4, False), ("sweep",)]


def filled(chance: random.Random) -> Iterator[Op]:
    """Redis is at its memory limit while a client reconnects, a gateway falls silent, and a request is cancelled."""
    yield from [
        ("accept", "g", "p", 1),
        ("accept", "g", "q", 1),
        ("beat", "a", 0),
        ("sweep",),
        ("claim", "a", 1, False),
    ]
    yield from [("append", "a", "p", "1", ""), ("fill", 1), ("append", "a", "p", "1", ""), ("unregister", "g", "p")]
    yield from [("sweep",), chance.choice([("register", "h", "p"), ("accept", "h", "p", 1), ("gateway_beat", "h")])]
    yield from [("tick", 600), ("gateway_beat", "h"), ("sweep",), ("tick", 600), ("gateway_beat", "h"), ("sweep",)]
    yield from [("tick", 600), ("gateway_beat", "h"), ("sweep",), ("accept", "g", "r", 1), ("cancel", "q"), ("sweep",)]
    yield from [("beat", "a", 0), ("fill", 0), ("gateway_beat", "h"), ("tick", 150), ("sweep",), ("tick", 600)]
    yield from [("append", "a", "p", "1", ""), ("gateway_beat", "h"), ("sweep",)]


STORIES = (poison, paused, generated, mislaid, stopped, sought, reissued, replaced, filled, None)


def walk(seed: int) -> list[Op]:
    """Return the operations of a seed: a scenario with a disturbance at each step, or disturbances alone."""
    chance = random.Random(seed)
    story = STORIES[seed % len(STORIES)]
    if story is None:
        return [anything(chance) for _ in range(60)]
    disturbed: list[Op] = [anything(chance) for _ in range(chance.choice([0, 0, 6]))]
    often = chance.choice([0.0, 0.1, 0.4])
    for op in story(chance):
        if chance.random() < often:
            disturbed.append(anything(chance))
        disturbed.append(op)
    return disturbed + [anything(chance) for _ in range(10)]


def run(client: Redis, ops: Sequence[Op], broken: Mapping[str, str] | None = None, *, twice: bool) -> None:
    """Run operations. ViolationError, or a script's ResponseError, has the failing operation as its last note."""
    protocol = Protocol(client, broken)
    protocol.twice = twice
    for place, op in enumerate(ops):
        try:
            protocol.do(op)
        except Exception as error:
            error.add_note(f"at {place}, {op}")
            raise


def shortest(client: Redis, ops: Sequence[Op], broken: Mapping[str, str] | None = None, *, twice: bool) -> list[Op]:
    """Return the shortest part of failing operations that still fails."""
    kept, place = list(ops), 0
    while place < len(kept):
        fewer = kept[:place] + kept[place + 1 :]
        try:
            run(client, fewer, broken, twice=twice)
            place += 1
        except Exception:  # noqa: BLE001 - any failure of the shorter one will do
            kept = fewer
    return kept


def explore(client: Redis, before: Sequence[Op], menu: Sequence[Op], depth: int) -> tuple[int, int]:
    """Try every order of so many of the menu's operations, each state once; return the numbers of states and steps.

    ViolationError with the operations that lead to it.
    """
    protocol = Protocol(client)
    protocol.twice, protocol.keeps = True, "lose" in {op[0] for op in menu}
    for op in before:
        protocol.do(op)
    level: list[tuple[bytes, Dump, list[Dump], list[Op]]] = [
        (pickle.dumps(protocol.world), protocol.redis.dump(), protocol.saved, [])
    ]
    known, steps = set[tuple[bytes, str]](), 0
    for _ in range(depth):
        following: list[tuple[bytes, Dump, list[Dump], list[Op]]] = []
        for world, dump, saved, path in level:
            for op in menu:
                protocol.world, protocol.saved = pickle.loads(world), saved  # noqa: S301 - our own
                protocol.redis.restore(dump)
                protocol.state = protocol.redis.content()
                steps += 1
                try:
                    protocol.do(op)
                except Exception as error:
                    error.add_note(f"after {[*before, *path, op]}")
                    raise
                state = pickle.dumps(protocol.world), repr(sorted(protocol.state.items()))
                if state not in known:
                    known.add(state)
                    following.append((state[0], protocol.redis.dump(), protocol.saved, [*path, op]))
        level = following
    return len(known), steps


# -- Broken variants of the scripts, each of which the model check has to catch.


class Mutant(NamedTuple):
    """One change of one script."""

    script: str
    sound: str
    broken: str
    walk: int = 0
    """Seed of a walk that catches it, tried before others."""

    def texts(self) -> Mapping[str, str]:
        """Return the broken text by script name. ValueError where the script no longer has `sound` exactly once."""
        text = SCRIPTS[self.script].text
        if text.count(self.sound) != 1:
            raise ValueError(f"{self.script} has {self.sound!r} {text.count(self.sound)} times, not once")
        return {self.script: text.replace(self.sound, self.broken)}


MUTANTS = [
    Mutant("accept", "if known[1] then\n  although_full()", "if false then\n  although_full()"),
    Mutant("accept", "if known[1] then\n  although_full()", "if known[1] then", walk=28),
    Mutant("accept", "if known[3] and known[3] ~= tenant then", "if false then", walk=5),
    Mutant("accept", "requests + 1 > max_requests", "requests > max_requests", walk=2),
    Mutant("accept", "mine[1] + 1 > mine[3]", "false", walk=62),
    Mutant("accept", "    charge(class, tenant, tokens, weight)\n", ""),
    Mutant("accept", "enqueue(id, 'resume', tokens)", "enqueue(id, class, tokens)", walk=13),
    Mutant("accept", "call('ZADD', prefix .. 'deadlines', now + deadline, id)", "", walk=2),
    Mutant("accept", "call('ZADD', prefix .. 'gateways', now + lease, gateway)", ""),
    Mutant("append", "or state[2] ~= epoch or state[3] ~= nonce", "", walk=1),
    Mutant("append", "state[3] ~= nonce", "false", walk=6),
    Mutant("append", "if known < 0 then", "if false then", walk=2),
    Mutant("append", "if known > 0 and not repeats(id, next_index, first, known, at) then", "if false then", walk=2),
    Mutant("append", "known == count and repeats(id, next_index, first, known, at)", "true"),
    Mutant("append", "retire(id, call('HGET', req, 'owner'), state[5], values[last + 2], retention)", "", walk=2),
    Mutant("append", "  call('HINCRBY', req, 'others', 1)\n", "", walk=2),
    Mutant("claim", "call('HINCRBY', req, 'epoch', 1)", "tonumber(call('HGET', req, 'epoch'))"),
    Mutant("claim", "  call('XDEL', queue, best.entry)\n", ""),
    Mutant("claim", "  uncount(best.id, best.queue.name, best.tokens)\n", ""),
    Mutant("claim", "call('SADD', prefix .. 'owned:' .. engine, id)", ""),
    Mutant("claim", "call('ZADD', prefix .. 'leases', now + lease, engine)", "", walk=1),
    Mutant("claim", "'step', '', 'alone'", "'alone'"),
    Mutant("claim", "'from', found[3], ", ""),
    Mutant("claim", "local alone = idle and", "local alone =", walk=30),
    Mutant("claim", "control_is_over(now, control) and claim_suspect()", "claim_suspect()", walk=50),
    Mutant(
        "claim",
        "is_foreign = print ~= '' and fingerprint ~= '' and print ~= fingerprint\n",
        "is_foreign = false\n",
        walk=1,
    ),
    Mutant("claim", "print == '' or fingerprint == '' or print == fingerprint, age", "true, age", walk=50),
    Mutant("claim", "if retired and name ~= 'resume:' .. fingerprint or", "if", walk=7),
    Mutant("claim", "if retired and name ~= 'resume:' .. fingerprint or", "if retired and tonumber(name) or", walk=17),
    Mutant(
        "claim",
        "if retired and name ~= 'resume:' .. fingerprint or",
        "if retired and not tonumber(name) or",
        walk=7,
    ),
    Mutant("claim", "class and arrival + class * ageing", "class and arrival - class * ageing", walk=7),
    Mutant("claim", "or arrival - BEGUN", "or arrival", walk=20),
    Mutant("claim", "best.key > bound or", "", walk=1),
    Mutant("claim", "or one.key < other.key or", "or one.key > other.key or", walk=7),
    Mutant("end", "if not due or tonumber(due) > now_ms() then", "if not due then", walk=1),
    Mutant("end", "if state == 'finished' then", "if false then", walk=2),
    Mutant("end", "if call('XDEL', queue, found[6]) == 1 then", "if false then", walk=2),
    Mutant("end", "uncount(id, found[5], found[7])", "", walk=2),
    Mutant("end", "call('HSETNX', req, 'f' .. choice, reason) == 1", "true", walk=2),
    Mutant("end", "tenant ~= '' and tenant ~= found[2]", "false", walk=5),
    Mutant("end", "call('ZREM', prefix .. 'verdicts', id)", ""),
    Mutant("expire", "\n        requeue_after_death(id, engine, now, control)", "\n      requeue(id, engine)"),
    Mutant("expire", "    note_death(engine, now)\n", ""),
    Mutant("expire", "if engine == ARGV[1] or", "if true or", walk=3),
    Mutant("gateway_heartbeat", "call('ZADD', prefix .. 'gateways', now_ms() + ARGV[2], ARGV[1])", ""),
    Mutant("gateway_heartbeat", "call('SCARD', prefix .. 'reads:' .. ARGV[1])", "0"),
    Mutant("hand_back", "and (ARGV[i + 2] == '' or found[3] == ARGV[i + 1] and found[4] == ARGV[i + 2])", "", walk=13),
    Mutant("hand_back", "and found[2] == engine", "", walk=13),
    Mutant("hand_back", "    if died then", "    if true then", walk=6),
    Mutant("heartbeat", "call('ZADD', prefix .. 'leases', now + lease, engine)", ""),
    Mutant("heartbeat", "    take_back(id)\n", "", walk=1),
    Mutant("heartbeat", "or chosen and chosen ~= engine then", "then", walk=15),
    Mutant("heartbeat", "call('ZREM', prefix .. 'deaths', engine)", ""),
    Mutant("heartbeat", "tonumber(ARGV[8] or 0), tonumber(ARGV[7]), tonumber(ARGV[9]), now)", "0, 0, 0, now)", walk=50),
    Mutant("heartbeat", "local waits = call('ZREM', prefix .. 'suspects', id) +", "local waits =", walk=4),
    Mutant("leave", "if call('EXISTS', prefix .. 'owned:' .. ARGV[1]) == 0 then", "do", walk=29),
    Mutant("leave", "drop_lease(ARGV[1], now_ms())", "", walk=1),
    Mutant("mark", "found[1] == 'running' and found[2] == ARGV[i + 1] and found[3] == ARGV[i + 2]", "found[1]", walk=3),
    Mutant("mark", "call('HSET', req, 'step', ARGV[i + 3])", ""),
    Mutant("poll", "found[2] == 'finished'", "false"),
    Mutant("register", "if not finished then", "if true then", walk=16),
    Mutant("register", "  although_full()\n  add_reader", "  add_reader", walk=8),
    Mutant("register", "or found[1] ~= ARGV[2]", "", walk=5),
    Mutant("register", "call('ZADD', prefix .. 'gateways', now + ARGV[4], gateway)", "", walk=7),
    Mutant("register", "add_reader(id, found[3], gateway)", "", walk=1),
    Mutant("registry", "call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])", ""),
    Mutant("registry", "'(' .. now, '+inf'", "'-inf', now"),
    Mutant("revive", "if found[2] then", "if false then"),
    Mutant("revive", "if not found[1] then", "if false then", walk=3),
    Mutant("revive", "'others', index - tokens", "'others', 0", walk=50),
    Mutant("revive", "call('ZADD', prefix .. 'suspects', now, new)", ""),
    Mutant("sweep", "postpone('leases', lease)", ""),
    Mutant(
        "sweep",
        "postpone('gateways', gateway_lease)\n  restart_graces(0)",
        "postpone('gateways', gateway_lease)",
        walk=10,
    ),
    Mutant("sweep", "or last[2] ~= run.id", "", walk=24),
    Mutant("sweep", "if call('XLEN', prefix .. 'queue:resume:' .. print) > 0 then", "if false then", walk=8),
    Mutant("forget", "add_queue('resume:' .. print)", "", walk=1),
    Mutant("sweep", "'deserted', 0", "'desert', 0"),
    Mutant("sweep", "elseif full then", "elseif false then", walk=8),
    Mutant("sweep", "restart_graces(tonumber(last[3]))", "restart_graces(0)", walk=18),
    Mutant("sweep", "restart_graces(tonumber(last[3]))", ""),
    Mutant("sweep", "    if not restarted then\n", "    if true then\n", walk=198),
    Mutant("sweep", "    note_death(engine, now)\n", ""),
    Mutant("sweep", "call('SADD', lapsed, id)", "", walk=1),
    Mutant("sweep", "\n    remove_reader(id, gateway, now)", ""),
    Mutant("sweep", "'silent', now + silence)", "'silent', now)"),
    Mutant("sweep", "silent <= now + MOST_SILENT_MS and math.max(now, silent) or now", "now"),
    Mutant("unregister", "silent <= now + MOST_SILENT_MS and math.max(now, silent) or now", "now", walk=319),
    Mutant("sweep", "storms(found[1] .. (found[3] or ''), found[2], now, window)", "false", walk=30),
    Mutant("sweep", "if call('HGET', prefix .. 'req:' .. id, 'owner') == engine then", "if false then", walk=1),
    Mutant("unregister", "remove_reader(ARGV[i], ARGV[1], now)", "", walk=1),
    Mutant("view", "found[10] ~= ARGV[2]", "false", walk=5),
    # Of the prelude, as it stands before one of the scripts that use it.
    Mutant("append", "call('SREM', prefix .. 'owned:' .. engine, id)", "", walk=2),
    Mutant("end", "call('PEXPIRE', prefix .. 'log:' .. id, length)", ""),
    Mutant("end", "  call('ZREM', prefix .. 'deadlines', id)\n", "", walk=2),
    Mutant("expire", "if words(alone) >= CONDEMNED then", "if words(alone) > CONDEMNED then"),
    Mutant("expire", "words(found[6]) >= SUSPECT", "words(found[6]) > SUSPECT"),
    Mutant("expire", "local same = found[1] == found[5]", "local same = true", walk=13),
    Mutant("hand_back", "'nonce', '')\n  if found[5]", "'reason', '')\n  if found[5]"),
    Mutant("hand_back", "resume_queue(began and found[4] or '')", "resume_queue('')", walk=6),
    Mutant("register", "gateway, id)\n  call('ZREM', prefix .. 'graces', id)\n", "gateway, id)\n", walk=1),
    Mutant("sweep", "found[3] ~= '1' and (found[3] == '0' or", "found[3] ~= '1' and (false or", walk=6),
]


# -- The real scripts under lost replies, late scripts, lost writes, dead and paused engines and clock steps.


WALKS_AT_ONCE = 20
REPLACED: tuple[Op, ...] = (
    ("retire", "a"),
    ("claim", "a", 4, False),
    ("claim", "b", 4, False),
    ("append", "a", "p", "1", ""),
    ("append", "a", "p", "end", "lost"),
    ("hand_back", "a", "p", ""),
    ("beat", "a", 1),
    ("leave", "a"),
    ("crash", "a", True),
    ("tick", 1200),
    ("sweep",),
    ("lose", 2),
)

MENU: tuple[Op, ...] = (
    ("claim", "a", 4, False),
    ("claim", "b", 4, True),
    ("append", "a", "p", "1", "lost"),
    ("append", "a", "p", "end", ""),
    ("stale_append", 0, "1"),
    ("hand_back", "a", "p", ""),
    ("crash", "a", True),
    ("cancel", "p"),
    ("unregister", "g", "p"),
    ("lose", 2),
)


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[Redis]:
    emptied(redis_server)
    with Redis(port=redis_server.port) as client:
        yield client


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in range(2, 8))])
def test_no_walk_breaks_a_rule(client: Redis, part: int) -> None:
    for seed in range(part * WALKS_AT_ONCE, (part + 1) * WALKS_AT_ONCE):
        twice = seed % 2 == 0
        try:
            run(client, walk(seed), twice=twice)
        except (ViolationError, ResponseError) as error:
            error.add_note(f"walk {seed}, as short as it gets: {shortest(client, walk(seed), twice=twice)}")
            raise


def test_a_request_that_ends_as_it_is_accepted_is_never_claimed(client: Redis) -> None:
    steps: list[Op] = [("beat", "a", 0), ("echo", "g", "p"), ("claim", "a", 4, False), ("echo", "g", "p"), ("sweep",)]
    steps += [("accept", "g", "p", 1), ("cancel", "p"), ("read", "g", "p"), ("claim", "a", 4, False)]
    for twice in (False, True):
        run(client, steps, twice=twice)


def test_a_grace_ends_while_redis_is_full_in_every_other_sweep(client: Redis) -> None:
    """And not before it has run for its whole length while Redis was not full."""
    protocol = Protocol(client)
    begun: list[Op] = [("accept", "g", "p", 1), ("unregister", "g", "p")]
    for op in begun:
        protocol.do(op)
    [until] = protocol.state["graces"].values()
    num_sweeps = 0
    while protocol.world.now < until or protocol.state["graces"]["p"] > protocol.world.now:
        for op in (("fill", num_sweeps % 2), ("gateway_beat", "g"), ("tick", 200), ("sweep",)):
            protocol.do(op)
        num_sweeps += 1
        assert num_sweeps < 3 * GRACE / 200
    assert protocol.world.now >= until + GRACE * 0.8


def test_every_order_of_three_steps_of_one_request(client: Redis) -> None:
    states, steps = explore(client, [("accept", "g", "p", 1)], MENU, 3)
    assert states > len(MENU)
    assert steps >= len(MENU)


@pytest.mark.parametrize("depth", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_every_order_of_steps_around_an_engine_that_ends(client: Redis, depth: int) -> None:
    begun: list[Op] = [("accept", "g", "p", 1), ("beat", "a", 0), ("beat", "b", 0), ("claim", "a", 4, False)]
    begun += [("append", "a", "p", "1", ""), ("accept", "g", "q", 1)]
    states, steps = explore(client, begun, REPLACED, depth)
    assert states > len(REPLACED)
    assert steps >= len(REPLACED)


# -- Would the model check notice? Each script has broken variants, and each is caught.


CATCHES = 480  # walks within which each broken script must be caught


def first_of_each(mutants: Sequence[Mutant]) -> list[Any]:
    """Return the mutants as parameters; all but the first one of each script are slow."""
    known: set[str] = set()
    found = []
    for place, each in enumerate(mutants):
        marks = [pytest.mark.slow] if each.script in known else []
        found.append(pytest.param(each, id=f"{each.script}-{place}", marks=marks))
        known.add(each.script)
    return found


@pytest.mark.parametrize("mutant", first_of_each(MUTANTS))
def test_a_broken_script_is_caught(client: Redis, mutant: Mutant) -> None:
    caught = next((seed for seed in (mutant.walk, *range(CATCHES)) if is_caught(client, mutant, seed)), None)
    assert caught is not None
    if caught != mutant.walk:
        print(f"walk {mutant.walk} no longer catches it, walk {caught} does: note that in MUTANTS")


ONLY_TELL = {"queue", "outline", "log_sizes"}
"""Scripts that change nothing, and whose answers no step of the protocol uses."""

AFTER_ALL = {"forget_model"}
"""Scripts that run when no engine and no unfinished request is left, tried in test_unpublish.py."""

APART = {"isolate"}
"""Scripts whose writes the checker makes itself where it needs them, tried in test_poison.py."""

BESIDE = {
    "reserve",
    "release",
    "enlist",
    "delist",
    "reserve_log",
    "settle_logs",
    "amend_model",
    "roster",
    "discard",
    "free_key",
}
"""Scripts of tenants' keys and models' cards, and of what has ended, which are beside the partitions, tested in
test_accept, test_log_quota, test_claim and test_engine_models. Those in folders have tests of their folder's name.
"""


def is_caught(client: Redis, mutant: Mutant, seed: int) -> bool:
    try:
        run(client, walk(seed), mutant.texts(), twice=seed % 2 == 0)
    except (ViolationError, ResponseError, LookupError):
        return True
    return False


def test_every_script_has_a_broken_variant_of_its_present_text() -> None:
    for mutant in MUTANTS:
        mutant.texts()
    beside_none = {name for name in SCRIPTS if "/" not in name}
    assert {mutant.script for mutant in MUTANTS} == beside_none - ONLY_TELL - AFTER_ALL - APART - BESIDE
