"""Options of commands, and settings, that pages name exist."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagestream_cli.__main__ import build_parser

pytestmark = pytest.mark.served

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("services/*/README.md"), *ROOT.glob("operator/*.md")]
SPAN = re.compile(r"```.*?\n(.*?)```|`([^`]+)`", re.DOTALL)
CALL = re.compile(r"(?:^|(?<!-n)[\s/(])pagestream ([a-z]+)((?:[^\n|&;#]|\\\n)*)")
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)")
VARIABLE = re.compile(r"PAGESTREAM_[A-Z]+__[A-Z0-9_]*[A-Z0-9]")


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Of a command and those below it."""
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found |= options_of(inner)
    return found


def calls() -> Iterator[tuple[str, str, str]]:
    for page in PAGES:
        for block, span in SPAN.findall(page.read_text()):
            for verb, rest in CALL.findall(block or " ".join(span.split())):
                for option in OPTION.findall(rest):
                    yield page.name, verb, option


def test_options_of_commands_are_there() -> None:
    parser = build_parser()
    [verbs] = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    known = {verb: options_of(each) for verb, each in verbs.choices.items()}
    found = list(calls())
    assert len(found) > 30
    assert [each for each in found if each[1] in known and each[2] not in known[each[1]]] == []
    assert {verb for _, verb, _ in found} <= {*known, "helm"}  # `helm install pagestream helm/pagestream`


def test_settings_are_there() -> None:
    """On docs/settings.md, which is written from the code."""
    known = {*VARIABLE.findall((ROOT / "docs" / "settings.md").read_text())}
    named = {(page.name, name) for page in PAGES for name in VARIABLE.findall(page.read_text())}
    assert len(named) > 200
    assert sorted(each for each in named if each[1] not in known) == []
