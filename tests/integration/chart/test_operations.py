"""The values that docs/operations.md shows are values of the chart."""

import re
from pathlib import Path

import pytest
from support.kubernetes.chart import ROOT, render

TEXT = (ROOT / "docs" / "operations.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_block_of_values_renders(number: int, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(BLOCKS[number])
    assert render("--values", str(file))


def test_every_value_that_is_named_exists() -> None:
    """Names with a dot between backquotes; a pool's own begin with groups that are left out here."""
    readme = (ROOT / "helm" / "pagestream" / "README.md").read_text()
    known = set(re.findall(r"^\| ([a-zA-Z0-9.]+) \|", readme, flags=re.MULTILINE))
    groups = {name.partition(".")[0] for name in known} - {"engine", "broker"}
    named = re.findall(r"`([a-zA-Z]+(?:\.[a-zA-Z0-9]+)+)(?:=[^`]*)?`", TEXT)
    values = {name for name in named if name.partition(".")[0] in groups}
    assert values
    assert {name for name in values if not any(is_within(name, value) for value in known)} == set()


def is_within(name: str, value: str) -> bool:
    """Whether the name is the value, a part of it, or the group that holds it."""
    return name == value or name.startswith(f"{value}.") or value.startswith(f"{name}.")
