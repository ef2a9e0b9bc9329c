"""`pagestream generate --offline`: the engine runs in the command's own process, which is this one."""

import pytest
from pagestream_cli.__main__ import main
from pagestream_cli.serve import find_demo_model

pytestmark = pytest.mark.served


def generate(*arguments: str) -> int:
    return main(["generate", *arguments, "--offline", str(find_demo_model())])


def test_a_completion_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("One evening", "--temperature", "0", "--max-tokens", "12") == 0
    assert len(capsys.readouterr().out.split()) > 5


@pytest.mark.parametrize("option", [["--temperature", "-1"], ["--top-p", "2"], ["--max-tokens", "0"]])
def test_a_wrong_parameter_is_named(capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    assert generate("One evening", *option) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert option[0].removeprefix("--").replace("-", "_") in said
