"""Fixtures that all tests share, and how they are given to the processes of pytest-xdist."""

from collections.abc import Iterator
from typing import Any

import pytest
from pagestream_streams.connection.embedded import EmbeddedRedis
from support.redis.servers import emptied, running_server
from xdist.scheduler import LoadFileScheduling

TOGETHER = ("tests/integration/operator/", "tests/integration/chart/")
"""Folders whose files share an API server, and therefore a process. They take long: they are begun first."""


def folder_together(nodeid: str) -> str | None:
    """Return which of TOGETHER a test is in."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), None)


class TogetherScheduling(LoadFileScheduling):
    """`--dist loadfile`, where a folder of TOGETHER counts as one file."""

    def _split_scope(self, nodeid: str) -> str:
        return folder_together(nodeid) or str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherScheduling | None:
    """Take part in `--dist loadfile` alone."""
    return TogetherScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders of TOGETHER first."""
    items.sort(key=lambda item: folder_together(item.nodeid) is None)


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A real server, fresh for each module."""
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of a real server without any keys."""
    return emptied(redis_server)
