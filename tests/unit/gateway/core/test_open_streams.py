import asyncio

import pytest
from pagestream_gateway.core.open_streams import OpenStreams
from pagestream_gateway.errors import GatewayStopping
from pagestream_gateway.metrics import Metrics
from pagestream_telemetry.instruments import Registry


async def hold(streams: OpenStreams, gate: asyncio.Event) -> str:
    with streams.entered():
        await gate.wait()
    return "finished"


async def test_streams_that_end_in_time_are_left_alone() -> None:
    streams, gate = OpenStreams(Metrics(Registry())), asyncio.Event()
    writing = asyncio.create_task(hold(streams, gate))
    await asyncio.sleep(0)
    assert len(streams) == 1
    draining = asyncio.create_task(streams.drain(20))
    gate.set()
    await draining
    assert await writing == "finished"


async def test_the_others_end_with_gateway_stopping() -> None:
    metrics = Metrics(Registry())
    streams = OpenStreams(metrics)
    writing = asyncio.create_task(hold(streams, asyncio.Event()))
    await asyncio.sleep(0)
    assert metrics.streams_open == 1
    await streams.drain(0.01)
    with pytest.raises(GatewayStopping):
        await writing
    assert (len(streams), metrics.streams_open) == (0, 0)
    with pytest.raises(GatewayStopping):
        await hold(streams, asyncio.Event())


async def test_a_clients_cancellation_stays_one() -> None:
    streams = OpenStreams(Metrics(Registry()))
    writing = asyncio.create_task(hold(streams, asyncio.Event()))
    await asyncio.sleep(0)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert len(streams) == 0
