"""Records beside the requests: engines that change their models, adapters, maps of blocks."""

import asyncio
import json

import pytest
from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED
from pagestream.v1.records_pb2 import Adapter, BlockMap
from pagestream_streams import AdapterRefused, Broker, GatewaySession
from pagestream_streams.admin import KEPT_MS, WATCHED_MS, BlockMaps, EngineRow, Reload, Verb, refuse_waiting
from support.protocol.token_streams import MODEL, TENANT, home_of, spec, worker
from support.redis.topologies import Place, ask_all

pytestmark = pytest.mark.served


async def test_of_two_engines_that_decide_on_one_reading_one_goes_on(broker: Broker) -> None:
    rows = {name: EngineRow(models=("a", "b"), serving="a", since_ms=1) for name in ("one", "two")}
    for name, row in rows.items():
        await broker.engine_models.renew(name, row)
    seen = await broker.engine_models.read()
    assert seen.engines == rows
    assert seen.served_ms["a"] == pytest.approx(seen.now_ms, abs=60_000)
    intention = EngineRow(models=("a", "b"), serving="b", is_loading=True)
    outcomes = await asyncio.gather(*(broker.engine_models.intend(name, intention, seen.version) for name in rows))
    assert sorted(outcomes) == [False, True]
    now = await broker.engine_models.read()
    assert sorted(row.serving for row in now.engines.values()) == ["a", "b"]
    assert "b" not in now.served_ms, "it is loading, and serves nothing"
    loser = next(name for name, row in now.engines.items() if row.serving == "a")
    assert await broker.engine_models.intend(loser, intention, now.version)


async def test_a_row_lapses_and_an_order_stays_until_it_is_settled(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.engine_models.order("b", Verb.LOAD)
    monkeypatch.setattr(home_of(broker.engine_models), "_ROW_MS", 1)
    failed = EngineRow(models=("a", "b"), failed={"b": "it is cut off"})
    view = await broker.engine_models.renew("gone", failed)
    assert (view.reason("b"), view.reason("a"), view.loadable) == ("it is cut off", None, {"a"})
    monkeypatch.undo()
    for _ in range(100):
        view = await broker.engine_models.read()
        if not view.engines:
            break
        await asyncio.sleep(0.01)
    assert (dict(view.engines), view.orders["b"].verb) == ({}, Verb.LOAD)
    await broker.engine_models.order("b", Verb.UNLOAD)
    await broker.engine_models.forget_order("b", view.orders["b"])
    newer = (await broker.engine_models.read()).orders["b"]
    assert newer.verb is Verb.UNLOAD, "an order that came in between was settled unread"
    await broker.engine_models.forget_order("b", newer)
    assert not (await broker.engine_models.read()).orders


async def test_a_full_redis_takes_renewals(broker: Broker, redis_server: Place) -> None:
    row = EngineRow(models=("a",), serving="a", since_ms=1)
    ask_all(redis_server, "CONFIG", "SET", "maxmemory", 1)
    try:
        view = await broker.engine_models.renew("one", row)
    finally:
        ask_all(redis_server, "CONFIG", "SET", "maxmemory", 0)
    assert view.engines == {"one": row}


async def test_what_a_later_version_writes_is_read_as_far_as_it_is_known(broker: Broker) -> None:
    row = EngineRow(models=("a",), serving="a", since_ms=1)
    view = await broker.engine_models.renew("one", row)
    key = broker.connection.keyspace.engine_models
    later = {"models": ["a"], "serving": "a", "since_ms": 1, "unheard_of": 1}
    await broker.connection.execute("HSET", key, "engine:two", f"{view.now_ms + 60_000} {json.dumps(later)}")
    await broker.connection.execute("HSET", key, "order:a", json.dumps({"verb": "unheard_of", "at_ms": 1}))
    view = await broker.engine_models.read()
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
        assert await broker.end_request(where, request.request_id, "error", condition="queued") is None
        await engine.generate(claim, 3)
        await engine.session.hand_back([claim.request_id])
    assert await refuse_waiting(broker, MODEL, "it is cut off") == 1
    assert (await broker.view(request.request_id, TENANT)).state == REQUEST_STATE_FINISHED


# -- The records of adapters: how many there may be.


async def test_no_more_than_the_most_are_loaded(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_of(broker.adapters), "MOST_ADAPTERS", 2)
    first, second, third = (Adapter(name=name, model=MODEL, path="/a", revision="0" * 32) for name in "abc")
    for each in (first, second, first):  # once more is no error
        await broker.adapters.publish(each)
    with pytest.raises(AdapterRefused, match="2 adapters are loaded"):
        await broker.adapters.publish(third)
    await broker.adapters.withdraw("a")
    await broker.adapters.publish(third)
    assert list(await broker.adapters.all()) == ["b", "c"]
    await broker.adapters.publish(Adapter(name="c", model=MODEL, path="/c", revision="1" * 32), Reload.REPLACE)
    assert (await broker.adapters.all())["c"].path == "/c"


async def test_a_name_in_use(broker: Broker) -> None:
    first = Adapter(name="a", model=MODEL, path="/a", revision="0" * 32)
    other = Adapter(name="a", model=MODEL, path="/b", revision="0" * 32)
    await broker.adapters.publish(first, Reload.REFUSE)
    await broker.adapters.publish(first)
    with pytest.raises(AdapterRefused, match="loaded already"):
        await broker.adapters.publish(first, Reload.REFUSE)
    with pytest.raises(AdapterRefused, match="loaded with other files"):
        await broker.adapters.publish(other)
    assert (await broker.adapters.all())["a"].path == "/a"


# -- Maps of engines' blocks on every kind of server: kept while somebody looks, and no longer.


MODELS = ["first/model", "second/model", "third/model"]


async def test_a_look_asks_all_engines_and_finds_what_is_there(broker: Broker) -> None:
    maps, keyspace = BlockMaps(broker.connection), broker.connection.keyspace
    assert not await maps.is_watched(MODELS[0])
    ids = [f"engine-{number}:nonce" for number in range(4)]
    assert await maps.watch(MODELS[:2], ids) == [None] * 4
    assert [await maps.is_watched(model) for model in MODELS] == [True, True, False]
    for engine_id in ids[1:]:
        await maps.publish(engine_id, BlockMap(num_blocks=len(engine_id), cells=[0, 1], at_ms=2**40))
    found = await maps.watch([], ids)
    assert [None if each is None else (each.num_blocks, list(each.cells), each.at_ms) for each in found] == [
        None,
        *[(len(ids[0]), [0, 1], 2**40)] * 3,
    ]
    for key, limit_ms in ((keyspace.watched(MODELS[0]), WATCHED_MS), (keyspace.block_map(ids[1]), KEPT_MS)):
        assert 0 < await broker.connection.execute("PTTL", key) <= limit_ms
    assert await maps.watch([], []) == []
