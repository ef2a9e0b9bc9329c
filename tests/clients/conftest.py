"""A deployment with the demo model, for the clients that `prepare.sh` installed, and what they found."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.stack import DEMO_MODEL, Stack

FOLDER = Path(os.environ.get("PAGESTREAM_CLIENTS", Path(__file__).parents[2] / ".clients"))
PROGRAMS = Path(__file__).parent / "programs"
REPORT = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run Redis, a gateway and an engine whose model takes the likeliest token where a body says nothing."""
    if not (FOLDER / ".prepared").exists():
        pytest.skip("the clients are not installed: `make clients`")
    folder = tmp_path_factory.mktemp("clients")
    model = folder / "demo"
    shutil.copytree(DEMO_MODEL, model)
    defaults = model / "generation_config.json"
    defaults.write_text(json.dumps(json.loads(defaults.read_text()) | {"temperature": 0.0}))
    running = Stack(folder, model=model, engine_options=("--dtype", "float32"))
    try:
        running.redis.start()
        running.add_engine()
        running.add_gateway()
        running.wait_ready()
        yield running.gateways[0].url
    finally:
        running.stop()


@pytest.fixture(scope="session")
def results() -> Callable[..., dict[str, Any]]:
    """Return what runs a program of this folder, or a command of Python's environment, and returns its JSON."""

    def run(name: str, *arguments: str, exit_codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
        binaries = FOLDER / "python" / "bin"
        if name.endswith(".mjs"):
            command: list[str | Path] = ["node", FOLDER / name]
        else:
            command = [binaries / "python", PROGRAMS / name] if name.endswith(".py") else [binaries / name]
        command += arguments
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=170, check=False)
        assert done.returncode in exit_codes, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


@pytest.fixture
def report(request: pytest.FixtureRequest) -> list[str]:
    """Return the lines that are printed at the end."""
    return request.config.stash.setdefault(REPORT, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what the tests found."""
    for line in config.stash.get(REPORT, []):
        terminalreporter.write_line(line)
