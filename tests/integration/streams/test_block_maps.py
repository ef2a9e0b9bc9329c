"""Maps of engines' blocks on every kind of server: kept while somebody looks, and no longer."""

from pagestream.v1.records_pb2 import BlockMap
from pagestream_streams import Broker
from pagestream_streams.observation.block_maps import KEPT_MS, WATCHED_MS, BlockMaps

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
