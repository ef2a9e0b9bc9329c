"""`serve --help-all` names every variable that the processes read, each with its default and what it says."""

import re
from itertools import pairwise

import pytest
from pagestream_cli.__main__ import main
from pagestream_gateway import load_settings as gateway_settings
from pagestream_worker import build_parser
from pagestream_worker import load_settings as worker_settings

SETTING = re.compile(r"  (PAGESTREAM_\w+) \((.+)\)")


@pytest.fixture
def settings(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """Default and text of each variable, as the command prints them; it starts nothing."""
    assert main(["serve", "--help-all", "--data-dir", "/nowhere/at/all"]) == 0
    found: dict[str, tuple[str, str]] = {}
    lines = capsys.readouterr().out.splitlines()
    for line, below in pairwise(lines):
        if named := SETTING.fullmatch(line):
            found[named[1]] = (named[2], below.strip())
    return found


def test_every_setting_says_what_it_does(settings: dict[str, tuple[str, str]]) -> None:
    assert [name for name, (default, text) in settings.items() if not default or not text] == []


def test_the_engines_options_are_all_there(settings: dict[str, tuple[str, str]]) -> None:
    for flag in ("max_num_seqs", "tensor_parallel_size", "quantization", "kv_cache_dtype", "enable_lora", "plugins"):
        assert f"--{flag.replace('_', '-')}" in build_parser().format_help()
        assert f"PAGESTREAM_ENGINE__{flag.upper()}" in settings
    assert len(settings) > 200


def test_what_is_listed_is_what_the_processes_take(settings: dict[str, tuple[str, str]]) -> None:
    numbers = {name: each for name, (each, _) in settings.items() if each.replace(".", "", 1).isdecimal()}
    assert len(numbers) > 40
    gateway_settings([], numbers)
    worker_settings(["/model", "--redis", "redis://x"], numbers)


def test_what_is_required_is_all_that_has_to_be_given(settings: dict[str, tuple[str, str]]) -> None:
    required = {name for name, (default, _) in settings.items() if default == "has to be given"}
    assert required == {"PAGESTREAM_WORKER__MODEL", "PAGESTREAM_WORKER__REDIS"}
    worker_settings([], dict.fromkeys(required, "redis://x"))
