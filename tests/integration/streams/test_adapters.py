"""The records of adapters: how many there may be."""

import pytest
from pagestream.v1.records_pb2 import Adapter
from pagestream_streams import Broker
from pagestream_streams.admin import adapters
from pagestream_streams.errors import AdapterRefused
from support.protocol.token_streams import MODEL


async def test_no_more_than_the_most_are_loaded(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MOST_ADAPTERS", 2)
    first, second, third = (Adapter(name=name, model=MODEL, path="/a", revision="0" * 32) for name in "abc")
    for each in (first, second, first):  # once more is no error
        await broker.adapters.publish(each)
    with pytest.raises(AdapterRefused, match="2 adapters are loaded"):
        await broker.adapters.publish(third)
    await broker.adapters.withdraw("a")
    await broker.adapters.publish(third)
    assert list(await broker.adapters.all()) == ["b", "c"]
