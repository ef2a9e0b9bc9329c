"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest
from pagestream_streams.connection.embedded import EmbeddedRedis
from support.redis.servers import emptied, running_server


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A real server, fresh for each module."""
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of a real server without any keys."""
    return emptied(redis_server)
