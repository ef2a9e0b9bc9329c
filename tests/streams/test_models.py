"""The model card: durable, cached by digest, known without any engine, and found again when Redis loses it."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_CANCELLED
from pagestream.v1.records_pb2 import ModelCard
from pagestream_streams import (
    Broker,
    GatewaySession,
    ModelNameRefused,
    ModelNotFound,
    RequestNotFound,
    StreamsSettings,
    unpublish,
)
from pagestream_streams.connection import Call
from pagestream_streams.protocol import Keyspace, new_request_id
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import CALM, MODEL, TENANT, card, eventually, spec, worker

pytestmark = pytest.mark.served


async def test_card_and_infos(broker: Broker) -> None:
    assert await broker.directory.card(MODEL) == card()
    [info] = await broker.models()
    assert (info.name, info.engines, info.partitions) == (MODEL, 0, 2)
    assert info.created > 1_600_000_000
    async with worker(broker), worker(broker):
        assert [info.engines for info in await broker.models()] == [2]


async def test_publishing_again_keeps_partitions_and_creation(broker: Broker) -> None:
    [before] = await broker.models()
    await broker.publish_model(ModelCard(name=MODEL, max_model_len=7), partitions=9)
    [after] = await broker.models()
    assert (after.created, after.partitions) == (before.created, 2)
    assert after.digest != before.digest
    assert await broker.directory.partitions(MODEL) == 2


async def test_another_process_sees_a_new_card(redis_url: str, broker: Broker) -> None:
    async with await Broker.connect(redis_url, CALM) as other:
        assert (await other.directory.card(MODEL)).max_model_len == 4096
        await broker.publish_model(ModelCard(name=MODEL, max_model_len=7))

        async def new() -> bool:
            return (await other.directory.card(MODEL)).max_model_len == 7

        await eventually(new)


async def test_unknown_model(broker: Broker) -> None:
    with pytest.raises(ModelNotFound, match="nothing"):
        await broker.directory.card("nothing")


async def test_many_who_miss_a_model_read_once_for_all(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else anyone could have the models read as often as he asks for one that isn't there."""
    await broker.models()
    await asyncio.sleep(0.15)  # older than what is read anew
    reads, execute = [0], broker.connection.execute

    async def counted(*command: Any) -> Any:
        reads[0] += command[0] == "HGETALL" and command[1] == broker.connection.keyspace.models
        return await execute(*command)

    monkeypatch.setattr(broker.connection, "execute", counted)
    begun = time.monotonic()
    found = await asyncio.gather(*(broker.directory.card("nothing") for _ in range(200)), return_exceptions=True)
    assert all(isinstance(each, ModelNotFound) for each in found)
    assert 1 <= reads[0] <= 3 + 10 * (time.monotonic() - begun)


@pytest.mark.parametrize("name", ["", "a b", "a{b", "a}b", "a\nb", "x" * 257])
async def test_names_that_can_t_be_keys_are_refused(broker: Broker, name: str) -> None:
    with pytest.raises(ModelNameRefused):
        await broker.publish_model(card(name))


@pytest.mark.parametrize("partitions", [0, -1, 65_537])
async def test_numbers_of_partitions_that_ids_can_t_hold_are_refused(broker: Broker, partitions: int) -> None:
    with pytest.raises(ValueError, match="partitions"):
        await broker.publish_model(card("other"), partitions=partitions)


async def test_ids_of_an_older_number_of_partitions_stay_valid(broker: Broker) -> None:
    """Of requests that were accepted then; nothing new is accepted where no engine of the model would look."""
    request = spec(partition=1)
    async with GatewaySession(broker) as gateway:
        await gateway.accept(request)
        assert await broker.cancel(request.request_id, request.tenant) == FINISH_REASON_CANCELLED
        await unpublish(broker, MODEL)
        await broker.publish_model(card(MODEL), partitions=1)
        assert await broker.cancel(request.request_id, request.tenant) == FINISH_REASON_CANCELLED
        assert not await gateway.accept(request)
        with pytest.raises(RequestNotFound):
            await gateway.accept(spec(partition=1))


# -- The models that a process knows, while Redis loses them under it.


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
    assert await broker.directory.partitions(MODEL) == 2
    await lose_models(broker)
    with pytest.raises(ModelNotFound):
        await broker.directory.card(MODEL)


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
    await broker.directory.check_published(new_request_id(MODEL, 0, TENANT))
    assert await broker.directory.partitions("other") == 3


async def test_a_model_is_found_as_soon_as_it_is_published(broker: Broker) -> None:
    """By a process whose view would be good for longer: a miss reads it anew, ten times a second at most."""
    async with await Broker.connect(broker.connection.url, StreamsSettings(directory_ttl_s=1000.0)) as reader:
        with pytest.raises(ModelNotFound):
            await reader.directory.partitions("other")
        await broker.publish_model(card("other"), partitions=3)
        async with asyncio.timeout(LIMIT_S):
            while "other" not in await reader.directory.names():
                with contextlib.suppress(ModelNotFound):
                    assert await reader.directory.partitions("other") == 3
                await asyncio.sleep(0.01)


async def test_beats_and_sweeps_do_not_wait_for_news_and_a_model_is_missing_only_where_redis_says_so(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dataclasses.replace(StreamsSettings(), directory_ttl_s=0.0)
    async with await Broker.connect(broker.connection.url, settings) as reader:
        assert await reader.directory.names() == [MODEL]
        await broker.publish_model(card("other"), partitions=3)
        execute = reader.connection.execute

        async def slow(*command: Any) -> Any:
            await asyncio.sleep(settings.beat_limit_s)
            return await execute(*command)

        monkeypatch.setattr(reader.connection, "execute", slow)
        assert await reader.directory.names() == [MODEL]
        assert await reader.directory.partitions("other") == 3
        assert (await reader.directory.locate(new_request_id("other", 1, TENANT))).model == "other"
        with pytest.raises(ModelNotFound):
            await reader.directory.partitions("missing")
