"""The examples that resume, while the gateway that they read from is killed."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.processes.stack import DEMO_MODEL, Stack
from support.processes.waiting import LIMIT_S

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("PAGESTREAM_CLIENTS", ROOT / ".clients"))
PROMPT = "Tell me a long story about the lighthouse."
EXAMPLES = {
    "python": [sys.executable, str(ROOT / "services" / "client" / "examples" / "resume.py")],
    "typescript": ["node", str(FOLDER / "built" / "resume.js")],
}

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(not (FOLDER / ".prepared").exists(), reason="the clients are not installed: `make clients`"),
]


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Run Redis, two gateways and an engine."""
    running = Stack(tmp_path, model=DEMO_MODEL, engine_options=("--dtype", "float32"))
    try:
        running.redis.start()
        running.add_engine()
        running.add_gateway()
        running.add_gateway()
        running.wait_ready()
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_text_is_that_of_an_undisturbed_stream(stack: Stack, name: str) -> None:
    urls = [gateway.url for gateway in stack.gateways]
    command = [*EXAMPLES[name], PROMPT, *urls]
    undisturbed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert len(undisturbed) > 500
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reading:
        assert reading.stdout is not None
        begun = reading.stdout.read(40)
        stack.gateways[0].kill()
        rest = reading.stdout.read()
        assert reading.wait(LIMIT_S) == 0
    assert (begun + rest).decode() == undisturbed
    stack.gateways[0].start()
