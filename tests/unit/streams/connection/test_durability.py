import pytest
from pagestream_streams import StreamsSettings, Unavailable
from pagestream_streams.connection.durability import Durability
from redis import exceptions


def test_by_default_nothing_is_waited_for() -> None:
    assert not Durability.of(StreamsSettings()).is_required


def test_replicas() -> None:
    durability = Durability.of(StreamsSettings(wait_replicas=2, wait_timeout_ms=50))
    assert durability.is_required
    [*_, key], wait = durability.commands("ps:{m/0}:")
    assert (key, wait) == ("ps:{m/0}:waited", ("WAIT", 2, 50))
    durability.check([b"OK", 2])
    with pytest.raises(Unavailable, match="2 replicas within 50 ms"):
        durability.check([b"OK", 1])


def test_disk_and_replicas() -> None:
    durability = Durability(1, True, 50)
    assert durability.commands("p:")[1:] == [("WAIT", 1, 50), ("WAITAOF", 1, 1, 50)]
    durability.check([b"OK", 1, [1, 1]])
    for reached in ([0, 1], [1, 0]):
        with pytest.raises(Unavailable, match="its own disk"):
            durability.check([b"OK", 1, reached])


def test_a_server_without_the_verb_is_named() -> None:
    with pytest.raises(Unavailable, match=r"from 7\.2 on"):
        Durability(0, True, 50).check([b"OK", exceptions.ResponseError("unknown command 'WAITAOF'")])
    with pytest.raises(Unavailable, match="appendonly"):
        Durability(0, True, 50).check([b"OK", exceptions.ResponseError("appendonly is disabled")])
    for replies in ([exceptions.ConnectionError("gone"), 1], [b"OK", exceptions.ConnectionError("gone")]):
        with pytest.raises(exceptions.ConnectionError):
            Durability(0, True, 50).check(replies)
