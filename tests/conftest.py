"""Fixtures that all tests share, and how they are given to the processes of pytest-xdist."""

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import certifi
import pytest
import redis.utils
from pagestream_streams.connection.embedded import EmbeddedRedis
from support.protocol.suite import COVER, CROWDS
from support.redis.servers import emptied, running_server
from xdist.scheduler import LoadFileScheduling

ON_CROWDS = [module for module, places in COVER.items() if not set(CROWDS).isdisjoint(places)]
SHARING = {
    "an API server": ("tests/integration/operator/", "tests/integration/chart/"),
    "a cluster and Sentinels": ("tests/integration/redis/", *map("tests/integration/streams/{}.py".format, ON_CROWDS)),
    "a process that compiles kernels": ("tests/unit/kernels/",),
}
"""Folders and files that share something of the session, and therefore a process."""
LONG = (
    "tests/integration/cli/",
    "tests/integration/stack/",
    "tests/integration/engine/",
    "tests/integration/worker/",
    "tests/unit/cli/test_doctor.py",
    "tests/unit/demo/",
    "tests/unit/scaling/test_law.py",
    "tests/unit/worker/stepping/",
)
"""Files that take more than 20 s, or have such beside them. They are begun first, but for what is shared."""


def shared_by(nodeid: str) -> str | None:
    """Return what a test shares with others."""
    return next((what for what, places in SHARING.items() if nodeid.startswith(places)), None)


class SharingScheduling(LoadFileScheduling):
    """`--dist loadfile`, where the files that share something count as one."""

    def _split_scope(self, nodeid: str) -> str:
        return shared_by(nodeid) or str(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharingScheduling | None:
    """Take part in `--dist loadfile` alone."""
    return SharingScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what takes long, so that all processes end at about the same time."""
    items.sort(key=lambda item: (shared_by(item.nodeid) is None, not item.nodeid.startswith(LONG)))


@pytest.fixture(scope="session", autouse=True)
def cheap_connections(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Spare what clients do anew for each connection and each test opens by the dozen.

    An HTTP client reads an authority instead of all 120 (50 ms of processor time); redis-py looks up its version in its
    package's metadata once (2 ms).
    """
    authorities = Path(certifi.where()).read_text(encoding="utf-8")
    end = "-----END CERTIFICATE-----\n"
    few = tmp_path_factory.mktemp("authorities") / "one.pem"
    few.write_text(authorities.partition(end)[0] + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(few))
        patch.setattr(redis.utils, "get_lib_version", cache(redis.utils.get_lib_version))
        yield


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A real server, fresh for each module."""
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of a real server without any keys."""
    return emptied(redis_server)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note that a run has begun: `.ci/run` runs nothing again where one has not come to its end."""
    if not hasattr(session.config, "workerinput"):
        mark = _unfinished(session.config)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note that all its tests have been run."""
    if not hasattr(session.config, "workerinput") and exitstatus in _ENDS:
        _unfinished(session.config).unlink(missing_ok=True)


_ENDS = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


def _unfinished(config: pytest.Config) -> Path:
    return config.rootpath / ".pytest_cache" / "unfinished" / str(os.getpid())
