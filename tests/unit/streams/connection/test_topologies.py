import pytest
from pagestream_streams import StreamsSettings
from pagestream_streams.connection.cluster import ClusterTopology
from pagestream_streams.connection.topologies import SingleServer, open_topology

SETTINGS = StreamsSettings()


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379/0",
        "rediss://user:secret@host:6380/1?ssl_ca_certs=/ca.crt",
        "unix:///run/redis.sock",
        "redis+sentinel://a:26379,b,[::1]:26380/pagestream/2",
        "rediss+sentinel://user:secret@a/pagestream?ssl_ca_certs=/ca.crt&sentinel_password=other",
    ],
)
async def test_one_server_at_a_time(url: str) -> None:
    link = open_topology(url, SETTINGS)
    assert isinstance(link, SingleServer)
    await link.close()


async def test_a_cluster() -> None:
    link = open_topology("redis+cluster://user:secret@a:7000,b:7001", SETTINGS)
    assert isinstance(link, ClusterTopology)
    await link.close()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:6379", "begins with"),
        ("http://a", "begins with"),
        ("redis+sentinel://a:26379", "service"),
        ("redis+sentinel://a/pagestream/zero", "service"),
        ("redis+cluster://a:7000/0", "one database"),
        ("redis+cluster://a:port", "host:port"),
        ("redis+cluster://a,,b", "host:port"),
        ("redis+cluster://a?ssl_ca_certs=/x", "unknown option"),
        ("rediss+cluster://a?colour=red", "colour"),
    ],
)
def test_what_is_wrong_is_said(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        open_topology(url, SETTINGS)
