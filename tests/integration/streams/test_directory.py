"""The models that a process knows, while Redis loses them under it."""

from collections.abc import Sequence
from typing import Any

import pytest
from pagestream_streams import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.errors import ModelNotFound
from pagestream_streams.protocol.keys import Keyspace
from support.protocol.token_streams import MODEL, card


async def lose_models(broker: Broker) -> None:
    for key in (Keyspace().models, Keyspace().model(MODEL)):
        await broker.connection.execute("DEL", key)


async def test_models_that_go_while_their_engines_are_counted(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    run_many = broker.connection.run_many

    async def late(calls: Sequence[Call]) -> list[Any]:
        """Redis loses its data, another task hears so, and only then come the counts."""
        await lose_models(broker)
        await broker.publish_model(card("other"), partitions=1)
        assert await broker.directory.names() == ["other"]
        return await run_many(calls)

    monkeypatch.setattr(broker.connection, "run_many", late)
    assert [(info.name, info.partitions) for info in await broker.models()] == [(MODEL, 2)]


async def test_a_card_that_redis_has_lost_is_of_no_model(broker: Broker) -> None:
    assert await broker.partitions(MODEL) == 2
    await lose_models(broker)
    with pytest.raises(ModelNotFound):
        await broker.model_card(MODEL)
