import subprocess
import sys

import pytest
from pagestream_cli.serve.model import find_demo_model


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagestream_cli", "generate", *arguments, "--offline", str(find_demo_model())]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_a_completion_without_a_server() -> None:
    done = generate("One evening", "--temperature", "0", "--max-tokens", "12")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5


@pytest.mark.parametrize("option", [["--temperature", "-1"], ["--top-p", "2"], ["--max-tokens", "0"]])
def test_a_wrong_parameter_is_named(option: list[str]) -> None:
    done = generate("One evening", *option)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert option[0].removeprefix("--").replace("-", "_") in done.stderr
