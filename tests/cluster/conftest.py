"""One release for all scenarios, which run in the order of `ORDER`; a table of times at the end.

`-m short` chooses what CI runs: install from nothing, stream, kill, scale to zero and back, upgrade, uninstall.

The cluster is KUBECONFIG's; images must lie on its nodes (tests/cluster/prepare.sh). Everything happens in namespaces
of these tests' own. On a failure, pods, events and logs are shown. With PAGESTREAM_KEEP_RELEASE set, the release is not
taken away at the end and used again by the next run: for work on one scenario.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from cluster.load import Content, Question, known_answers
from cluster.release import (
    CHART,
    IMAGES,
    NAMESPACE,
    ROOT,
    VALUES,
    Scene,
    Times,
    archive,
    make_namespace,
    wait_for_pool,
)
from cluster.resources import Release, reachable_cluster
from support.kubernetes.api import CommandError, run_tool
from support.redis.servers import skip_for_want_of

TABLE = ROOT / "docs" / "benchmarks" / "cluster.md"
ORDER = (
    "install",
    "scaling",
    "disturbances",
    "rollout",
    "zero",
    "upgrade",
    "neighbours",
    "models",
    "nodes",
    "uninstall",
)
NUM_QUESTIONS = 12
MOST_TOKENS = 600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-times", action="store_true", help="write the table of times to docs/benchmarks/cluster.md"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = item.path.stem.removeprefix("test_")
        return ORDER.index(name) if name in ORDER else -1

    ours = [item for item in items if item.path.parent == Path(__file__).parent]
    ordered = iter(sorted(ours, key=place))
    items[:] = [next(ordered) if item in ours else item for item in items]
    for item in ours:
        item.add_marker(pytest.mark.cluster)
        item.add_marker(pytest.mark.timeout(400))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and os.environ.get("KUBECONFIG") and "release" in getattr(item, "fixturenames", ()):
        spaces = [NAMESPACE, *getattr(item.module, "NAMESPACES", ())]
        report.sections += [(f"namespace {space.name}", space.describe()) for space in spaces]
    return report


_times = Times()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    if not _times.rows:
        return
    terminalreporter.section("times")
    terminalreporter.write(_times.table())
    if exitstatus == 0 and config.getoption("--record-times", default=False):
        head = TABLE.read_text().partition("| what |")[0]
        TABLE.write_text(head + _times.table())


@pytest.fixture(scope="session")
def times() -> Times:
    """Where scenarios note what took how long."""
    return _times


@pytest.fixture(scope="session")
def image_values() -> dict[str, object]:
    """The chart's values that name the built images."""
    found: dict[str, tuple[str, str]] = {}
    for path in IMAGES.glob("pagestream-*.tar"):
        with archive.open_archive(path) as image:
            name, _, tag = image.tags[0].rpartition(":")
        registry, _, repository = name.rpartition("/")
        found[path.stem] = (registry or "docker.io/library", tag)
        assert repository == path.stem
    needed = [f"pagestream-{name}" for name in ("gateway", "operator", "engine", "test-redis", "test-otelcol")]
    missing = [name for name in needed if name not in found]
    if missing:
        skip_for_want_of("cluster", f"not built: {', '.join(missing)}; see tests/cluster/prepare.sh")
    values: dict[str, object] = {
        "image.registry": found["pagestream-engine"][0],
        "image.tag": found["pagestream-engine"][1],
    }
    for path, name in (
        ("redis.bundled.image", "pagestream-test-redis"),
        ("collector.image", "pagestream-test-otelcol"),
    ):
        registry, tag = found[name]
        values |= {f"{path}.registry": registry, f"{path}.repository": name, f"{path}.tag": tag}
    return values


@pytest.fixture(scope="session")
def release(times: Times, image_values: dict[str, object]) -> Iterator[Release]:
    """The chart, installed with default values and the demo model."""
    reachable_cluster()
    release = Release("pagestream", NAMESPACE, CHART, image_values, (VALUES,))
    kept = bool(os.environ.get("PAGESTREAM_KEEP_RELEASE"))
    if not (kept and release.is_there):
        with suppress(CommandError):
            release.uninstall()
        with suppress(CommandError):
            run_tool("kubectl", "delete", "crd", "enginepools.pagestream.dev", "--wait", "--timeout", "60s", limit_s=70)
        make_namespace(NAMESPACE)
        with times.of("helm install, until gateway, Redis, operator and collector are ready"):
            release.install()
        with times.of("from there until the demo pool is ready"):
            wait_for_pool("demo", 1)
    yield release
    if not kept:
        with suppress(CommandError):
            release.uninstall()
        with suppress(CommandError):
            run_tool("kubectl", "delete", "namespace", NAMESPACE.name, "--wait", "--timeout", "120s", limit_s=130)


@pytest.fixture(scope="session")
def api_key(release: Release) -> str:
    """The key that the chart has made."""
    return release.namespace.secret(f"{release.name}-api-key", "key")


@pytest.fixture(scope="session")
def target(release: Release) -> str:
    """host:port of the gateways' Service for gRPC."""
    return f"{release.namespace.service_address(f'{release.name}-gateway')}:50051"


@pytest.fixture(scope="session")
def questions() -> list[Question]:
    """What the streams ask: half of it greedy, half of it sampled."""
    return [Question(number, MOST_TOKENS) for number in range(NUM_QUESTIONS)]


@pytest.fixture(scope="session")
def answers(target: str, api_key: str, questions: list[Question]) -> dict[int, Content]:
    """What the undisturbed release answers."""
    with ThreadPoolExecutor(1) as thread:  # where no test's event loop is
        return thread.submit(asyncio.run, known_answers([target], api_key, questions)).result()


@pytest.fixture(scope="session")
def scene(release: Release, target: str, api_key: str, questions: list[Question], answers: dict[int, Content]) -> Scene:
    """What the scenarios disturb."""
    return Scene(release, target, api_key, questions, answers, _times)
