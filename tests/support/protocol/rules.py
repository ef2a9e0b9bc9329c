"""Invariants of the protocol's state in Redis and of each step, written from the documents and not from the Lua."""

from __future__ import annotations

import hashlib
from typing import Any

from support.protocol.virtual_streams import Content

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
