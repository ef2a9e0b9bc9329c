"""The roster of engines that change their models: rows that lapse, and intentions that know each other."""

import asyncio
import json

import pytest
from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED
from pagestream_streams import Broker, GatewaySession
from pagestream_streams.admin import roster
from pagestream_streams.admin.roster import RosterRow, Verb
from pagestream_streams.admin.unserved import refuse_waiting
from support.protocol.token_streams import MODEL, TENANT, spec, worker
from support.redis.topologies import Place, ask_all


async def test_of_two_engines_that_decide_on_one_reading_one_goes_on(broker: Broker) -> None:
    rows = {name: RosterRow(models=("a", "b"), serving="a", since_ms=1) for name in ("one", "two")}
    for name, row in rows.items():
        await broker.roster.renew(name, row)
    seen = await broker.roster.read()
    assert seen.engines == rows
    assert seen.served_ms["a"] == pytest.approx(seen.now_ms, abs=60_000)
    intention = RosterRow(models=("a", "b"), serving="b", is_loading=True)
    outcomes = await asyncio.gather(*(broker.roster.intend(name, intention, seen.version) for name in rows))
    assert sorted(outcomes) == [False, True]
    now = await broker.roster.read()
    assert sorted(row.serving for row in now.engines.values()) == ["a", "b"]
    assert "b" not in now.served_ms, "it is loading, and serves nothing"
    loser = next(name for name, row in now.engines.items() if row.serving == "a")
    assert await broker.roster.intend(loser, intention, now.version)


async def test_a_row_lapses_and_an_order_stays_until_it_is_settled(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.roster.order("b", Verb.LOAD)
    monkeypatch.setattr(roster, "_ROW_MS", 1)
    failed = RosterRow(models=("a", "b"), failed={"b": "it is cut off"})
    view = await broker.roster.renew("gone", failed)
    assert (view.reason("b"), view.reason("a"), view.loadable) == ("it is cut off", None, {"a"})
    monkeypatch.undo()
    for _ in range(100):
        view = await broker.roster.read()
        if not view.engines:
            break
        await asyncio.sleep(0.01)
    assert (dict(view.engines), view.orders["b"].verb) == ({}, Verb.LOAD)
    await broker.roster.order("b", Verb.UNLOAD)
    await broker.roster.settle("b", view.orders["b"])
    newer = (await broker.roster.read()).orders["b"]
    assert newer.verb is Verb.UNLOAD, "an order that came in between was settled unread"
    await broker.roster.settle("b", newer)
    assert not (await broker.roster.read()).orders


async def test_a_full_redis_takes_renewals(broker: Broker, redis_server: Place) -> None:
    row = RosterRow(models=("a",), serving="a", since_ms=1)
    ask_all(redis_server, "CONFIG", "SET", "maxmemory", 1)
    try:
        view = await broker.roster.renew("one", row)
    finally:
        ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)
    assert view.engines == {"one": row}


async def test_what_a_later_version_writes_is_read_as_far_as_it_is_known(broker: Broker) -> None:
    row = RosterRow(models=("a",), serving="a", since_ms=1)
    view = await broker.roster.renew("one", row)
    key, later = broker.connection.keyspace.roster, {"models": ["a"], "serving": "a", "since_ms": 1, "unheard_of": 1}
    await broker.connection.execute("HSET", key, "engine:two", f"{view.now_ms + 60_000} {json.dumps(later)}")
    await broker.connection.execute("HSET", key, "order:a", json.dumps({"verb": "unheard_of", "at_ms": 1}))
    view = await broker.roster.read()
    assert (view.engines, view.orders) == ({"one": row, "two": row}, {})


async def test_begun_requests_of_a_model_that_does_not_load_end_and_running_ones_go_on(
    broker: Broker,
) -> None:
    request = spec()
    async with GatewaySession(broker) as gateway:
        await gateway.accept(request)
    where = await broker.directory.locate(request.request_id)
    async with worker(broker) as engine:
        [claim] = await engine.claim()
        await engine.generate(claim, 2)
        assert await broker.end(where, request.request_id, "error", condition="queued") is None
        await engine.generate(claim, 3)
        await engine.session.hand_back([claim.request_id])
    assert await refuse_waiting(broker, MODEL, "it is cut off") == 1
    assert (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_FINISHED
