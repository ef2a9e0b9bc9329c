"""The table of servers names tests that exist, and runs each of them on some server."""

import ast
from pathlib import Path

import pytest
from support.protocol.suite import CLUSTER, COVER, NEWEST, OLDEST, OMITTED, PLACES, SENTINELS, is_in_cover, places

FOLDER = Path(__file__).resolve().parents[3] / "integration" / "streams"


def names_in(module: str) -> set[str]:
    """Return the names of a module's tests as the table has them."""
    found: set[str] = set()
    for node in ast.parse((FOLDER / f"{module}.py").read_text()).body:
        if isinstance(node, ast.ClassDef):
            inside = [each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}::{name}" for name in inside}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize("name", [*COVER, *OMITTED])
def test_every_name_is_that_of_a_test(name: str) -> None:
    module, _, test = name.partition("::")
    assert (FOLDER / f"{module}.py").is_file()
    assert not test or test in names_in(module)


@pytest.mark.parametrize("module", COVER)
def test_the_cover_is_part_of_the_whole(module: str) -> None:
    assert set(COVER[module]) <= set(places(module, ""))


def test_every_place_is_in_the_cover() -> None:
    assert {place for module in COVER for place in COVER[module]} == set(PLACES) == {OLDEST, NEWEST, CLUSTER, SENTINELS}


def test_what_is_not_named_runs_everywhere_and_on_the_oldest_in_the_cover() -> None:
    assert places("test_not_named", "test_something") == PLACES
    assert [place for place in PLACES if is_in_cover("test_not_named", place)] == [OLDEST]


def test_an_omission_says_why() -> None:
    assert all(omission.why and omission.places for omission in OMITTED.values())
