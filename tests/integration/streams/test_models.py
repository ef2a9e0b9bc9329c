"""The model card: durable, cached by digest, and known without any engine."""

import asyncio
from typing import Any

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_CANCELLED
from pagestream.v1.records_pb2 import ModelCard
from pagestream_streams import Broker, GatewaySession, ModelNameRefused, ModelNotFound, RequestNotFound, unpublish
from support.protocol.token_streams import FAST, MODEL, card, eventually, spec, worker


async def test_card_and_infos(broker: Broker) -> None:
    assert await broker.model_card(MODEL) == card()
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
    assert await broker.partitions(MODEL) == 2


async def test_another_process_sees_a_new_card(redis_url: str, broker: Broker) -> None:
    async with await Broker.connect(redis_url, FAST) as other:
        assert (await other.model_card(MODEL)).max_model_len == 4096
        await broker.publish_model(ModelCard(name=MODEL, max_model_len=7))

        async def new() -> bool:
            return (await other.model_card(MODEL)).max_model_len == 7

        await eventually(new)


async def test_unknown_model(broker: Broker) -> None:
    with pytest.raises(ModelNotFound, match="nothing"):
        await broker.model_card("nothing")


async def test_many_who_miss_a_model_read_once_for_all(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else anyone could have the models read as often as he asks for one that isn't there."""
    await broker.models()
    await asyncio.sleep(0.15)  # older than what is read anew
    reads, execute = [0], broker.connection.execute

    async def counted(*command: Any) -> Any:
        reads[0] += command[0] == "HGETALL" and command[1] == broker.connection.keyspace.models
        return await execute(*command)

    monkeypatch.setattr(broker.connection, "execute", counted)
    found = await asyncio.gather(*(broker.model_card("nothing") for _ in range(200)), return_exceptions=True)
    assert all(isinstance(each, ModelNotFound) for each in found)
    assert 1 <= reads[0] <= 3


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
