"""The models that a process knows, while Redis loses them under it."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
from pagestream_streams import Broker, StreamsSettings
from pagestream_streams.connection.connection import Call
from pagestream_streams.errors import ModelNotFound
from pagestream_streams.protocol import ids
from pagestream_streams.protocol.keys import Keyspace
from support.protocol.token_streams import MODEL, TENANT, card


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


async def test_what_was_read_while_a_model_was_published_is_read_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep reads the models, another task publishes one, and only then come the rows: none of the new model."""
    pipeline = broker.connection.pipeline

    async def late(commands: Sequence[Sequence[Any]], limit_s: float | None = None) -> list[Any]:
        monkeypatch.setattr(broker.connection, "pipeline", pipeline)
        rows = await pipeline(commands, limit_s)
        await broker.publish_model(card("other"), partitions=3)
        return rows

    monkeypatch.setattr(broker.connection, "pipeline", late)
    await broker.directory.check_published(ids.new(MODEL, 0, TENANT))
    assert await broker.partitions("other") == 3


async def test_a_model_is_found_as_soon_as_it_is_published(broker: Broker) -> None:
    """By a process whose view would be good for longer: a miss reads it anew, ten times a second at most."""
    async with await Broker.connect(broker.connection.url, StreamsSettings(directory_ttl_s=1000.0)) as reader:
        with pytest.raises(ModelNotFound):
            await reader.partitions("other")
        await broker.publish_model(card("other"), partitions=3)
        async with asyncio.timeout(5):
            while "other" not in await reader.directory.names():
                with contextlib.suppress(ModelNotFound):
                    assert await reader.partitions("other") == 3
                await asyncio.sleep(0.01)
