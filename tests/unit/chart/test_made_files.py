"""Files that are made from others are as they would be made now."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

TOOL: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "generate_chart.py"))


@pytest.mark.parametrize("part", ["schema", "dashboards"])
def test_is_up_to_date(part: str) -> None:
    for path, text in TOOL["PARTS"][part]().items():
        assert path.read_text() == text, f"run tools/generate_chart.py {part}"


def test_the_pools_schema_has_the_fields_of_the_definition_but_replicas() -> None:
    properties = json.loads(TOOL["schema_text"]())["$defs"]["enginePoolSpec"]["properties"]
    assert {"model", "engine", "template", "scaling", "minReplicas", "maxReplicas"} <= set(properties)
    assert "replicas" not in properties
