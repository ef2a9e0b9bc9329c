"""The records of adapters: how many there may be."""

import pytest
from pagestream.v1.records_pb2 import Adapter
from pagestream_streams import Broker
from pagestream_streams.admin import adapters
from pagestream_streams.admin.adapters import Reload
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
