"""`pagestream simulate` on the packaged trace."""

import json
from pathlib import Path

import pytest
from pagestream_cli.__main__ import main
from pagestream_simulator import SAMPLE

pytestmark = pytest.mark.served


def test_the_command_prints_a_table_and_writes_numbers_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"stabilization": {"down_s": 30.0}}))
    numbers, picture = tmp_path / "numbers.json", tmp_path / "picture.png"
    arguments = ["--engines-at-peak", "4", "--startup", "5", "--plan-changes", "5", "--policy", str(policy)]
    assert main(["simulate", SAMPLE, *arguments, "--output", str(numbers), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    content = json.loads(numbers.read_text())
    assert set(content["laws"]) == {"optimum", "fixed", "pagestream", "hpa", "keda"}
    assert all(name in printed for name in content["laws"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--engines-at-peak", "0"], "--engines-at-peak 0"),
        (["--startup", "-1"], "--startup -1"),
        (["--policy", "missing.json"], "missing.json"),
        (["--profile", "missing.json"], "missing.json"),
        (["--terms", "missing.toml"], "missing.toml"),
    ],
)
def test_an_invalid_option_or_file_is_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", SAMPLE, *arguments]) == 2
    assert named in capsys.readouterr().err
