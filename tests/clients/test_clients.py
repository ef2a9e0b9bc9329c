"""Clients that others wrote, against the processes of a deployment with the demo model; see prepare.sh."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes.stack import DEMO_MODEL, Stack

PROGRAMS = Path(__file__).parent / "programs"
ANSWER = "Mara lives in the lighthouse."
VILLAGER = {"name": "Mara", "job": "lighthouse keeper", "age": 42}
CALLS = [["get_weather", {"city": "Paris"}], ["add", {"a": 17, "b": 25}]]
TOLD = "The weather in Paris: rain, 12 degrees. 17 + 25 = 42."
FOLDER = Path(os.environ.get("PAGESTREAM_CLIENTS", Path(__file__).parents[2] / ".clients"))

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not (FOLDER / ".prepared").exists(), reason="the clients are not installed: `make clients`"),
]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run Redis, a gateway and an engine."""
    running = Stack(tmp_path_factory.mktemp("clients"), model=DEMO_MODEL, engine_options=("--dtype", "float32"))
    try:
        running.redis.start()
        running.add_engine()
        running.add_gateway()
        running.wait_ready()
        yield running.gateways[0].url
    finally:
        running.stop()


def results(*command: str | Path) -> dict[str, Any]:
    """Run a program; return the JSON that it prints."""
    done = subprocess.run([*command], cwd=FOLDER, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ["langchain", "litellm"])
def test_libraries_for_python(url: str, name: str) -> None:
    found = results(FOLDER / "python" / "bin" / "python", PROGRAMS / f"{name}_program.py", url)
    assert (found["text"], found["streamed"], found["tokens"]) == (ANSWER, ANSWER, 7)
    assert found["num_chunks"] > 3
    assert (found["forced"], found["calls"], found["answer"]) == (CALLS[:1], CALLS, TOLD)
    assert found["structured"] == VILLAGER


def test_the_llm_command(url: str) -> None:
    found = results(FOLDER / "python" / "bin" / "python", PROGRAMS / "llm_program.py", url)
    assert found == {"text": ANSWER, "streamed": ANSWER, "structured": VILLAGER}


@pytest.mark.parametrize("name", ["ai_sdk", "openai_node"])
def test_libraries_for_javascript(url: str, name: str) -> None:
    found = results("node", FOLDER / f"{name}.mjs", url)
    assert (found["text"], found["streamed"], found["tokens"]) == (ANSWER, ANSWER, 7)
    assert found["num_chunks"] > 3
    assert (found["forced"], found["calls"], found["answer"]) == (CALLS[:1], CALLS, TOLD)
    assert found["structured"] == VILLAGER
    assert found.get("response", ANSWER) == ANSWER
