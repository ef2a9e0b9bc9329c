"""Fixtures that all tests share, and how files are given to the processes of pytest-xdist.

Nothing heavy is imported here: a test of the scheduler starts without Redis, gRPC or torch.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from functools import cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import certifi
import pytest
from support.processes.waiting import LIMIT_S
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from pagestream_streams import EmbeddedRedis

pytest_plugins = ["support.processes.session", "support.processes.forked_workers"]

SHARING = {
    "an API server": ("tests/chart/kube/",),
    "an API server with controllers": ("tests/operator/kube/",),
    "an API server that is disturbed": ("tests/operator/replicas/",),
    "a Cluster and Sentinels": ("tests/streams/",),
    "a process that compiles kernels": ("tests/kernels/", "tests/engine/attention/"),
    "a process that imports models of transformers": (
        *("tests/engine/models/", "tests/engine/test_refusals.py", "tests/engine/test_parity.py"),
        *("tests/engine/test_pooling.py", "tests/engine/test_examples.py", "tests/engine/test_logprobs.py"),
        *("tests/engine/layers/test_rope.py", "tests/api/parts/test_chat_templates.py"),
    ),
    "a process that forks what serves a model": (
        *(
            "tests/faults/",
            "tests/cli/test_pod_environment.py",
            "tests/cli/test_stack.py",
            "tests/cli/test_telemetry.py",
        ),
        *("tests/worker/test_model_changes.py", "tests/worker/test_poison.py", "tests/worker/test_process.py"),
        "tests/api/openai/test_of_a_model.py",
    ),
    "a process that forks ranks and engines": (
        *("tests/engine/executor/", "tests/engine/test_ranks.py", "tests/worker/test_answers_at_the_end.py"),
        *("tests/worker/test_block_maps.py", "tests/worker/test_engine_process.py", "tests/worker/test_telemetry.py"),
    ),
}
"""Folders that share something of the session, and therefore a process."""
LONG = (
    *("tests/faults/", "tests/cli/", "tests/engine/", "tests/worker/"),
    *("tests/operator/clusters/", "tests/chart/test_smoke.py"),
)
"""Folders with files that take more than 20 s. They are begun first, but for what is shared."""

_LEFT_OUT = re.compile(r"not \w+( and not \w+)*")
_FILE_MARKS = re.compile(r"^pytestmark = (?:\[.*?\]|[^\[\n]*)$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"pytest\.mark\.(\w+)")


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't import a file of which `-m 'not A and not B'` leaves out all: it is marked so as a whole."""
    expression = config.getoption("markexpr")
    if collection_path.suffix != ".py" or not _LEFT_OUT.fullmatch(expression):
        return None
    marks = _FILE_MARKS.search(collection_path.read_text(encoding="utf-8"))
    left_out = set(expression.split()) - {"not", "and"}
    return bool(marks and left_out.intersection(_MARK.findall(marks[0]))) or None


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Before a file with `hypothesis` is imported, and hypothesis with it: no example has a limit of its own."""
    if "hypothesis" in module_path.read_text(encoding="utf-8"):
        _take_the_time_it_takes()


@cache
def _take_the_time_it_takes() -> None:
    from hypothesis import HealthCheck, settings

    if settings.get_current_profile_name() == "default":  # neither CI's nor one that was asked for
        settings.register_profile("at home", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("at home")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Import what is collected without looking for garbage, and know the profile of `make deep PARTS=properties`."""
    gc.disable()
    if config.getoption("--hypothesis-profile", None) == "deep":
        from hypothesis import settings

        settings.register_profile("deep", max_examples=1000, deadline=None, derandomize=False)


def pytest_collection_finish() -> None:
    """Leave out of each later search for garbage what the modules hold: half a million objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Show again what was left out: hypothesis, imported for its summary, takes trio's generator for garbage.

    A process of pytest-xdist has no summary, and ends without a look at all that was imported.
    """
    if not hasattr(session.config, "workerinput"):
        gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first what takes long, so that all processes end at about the same time."""
    items.sort(key=lambda item: (shared_by(item.nodeid) is None, not item.nodeid.startswith(LONG)))


@pytest.fixture(scope="session", autouse=True)
def few_authorities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have HTTP clients read one certificate authority for each connection instead of 120 (50 ms of processor time)."""
    authorities = Path(certifi.where()).read_text(encoding="utf-8")
    end = "-----END CERTIFICATE-----\n"
    few = tmp_path_factory.mktemp("authorities") / "one.pem"
    few.write_text(authorities.partition(end)[0] + end, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(few))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> None:
    """Have HTTP clients wait as long as everything else: by themselves they give up after 5 s."""
    for name in ("httpx", "httpx2"):
        if (module := sys.modules.get(name)) is not None:
            limit = signature(module.Client).parameters["timeout"].default
            limit.connect = limit.read = limit.write = limit.pool = LIMIT_S


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A real server, fresh for each module."""
    import redis.utils
    from support.redis.servers import running_server

    with pytest.MonkeyPatch.context() as patch:
        # redis-py reads its version from its package's metadata for each connection (2 ms).
        patch.setattr(redis.utils, "get_lib_version", cache(redis.utils.get_lib_version))
        with running_server(tmp_path_factory.mktemp("redis")) as server:
            yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """The URL of a real server without any keys."""
    from support.redis.servers import emptied

    return emptied(redis_server)
