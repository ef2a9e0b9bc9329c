import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagestream_operator.api import ApiModel
from pagestream_operator.crd import SchemaError, definition, definition_text, structural_schema
from pydantic import Field

ROOT = Path(__file__).resolve().parents[2]
COPIES = (
    ROOT / "operator/src/pagestream_operator/crd/enginepools.yaml",
    ROOT / "helm/pagestream/crds/enginepools.yaml",
)


class Part(ApiModel):
    """A part."""

    count: int = Field(default=2, gt=0)
    """How many."""


class Whole(ApiModel):
    """A whole."""

    name: str
    """Of it."""
    part: Part = Field(default_factory=Part)
    """Of the whole."""
    note: str | None = None
    """If any."""


def schema_of(path: str) -> dict[str, Any]:
    node: dict[str, Any] = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        node = node["properties"][name]
    return node


def nodes(schema: dict[str, Any], where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield where, schema
    for name, part in schema.get("properties", {}).items():
        yield from nodes(part, f"{where}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{where}[]")


@pytest.mark.parametrize("copy", COPIES, ids=["package", "chart"])
def test_committed_copies_are_what_the_models_say(copy: Path) -> None:
    assert copy.read_text() == definition_text(), "run: .venv/bin/python tools/generate_crd.py"


def test_the_tool_writes_those_copies() -> None:
    spec = importlib.util.spec_from_file_location("generate_crd", ROOT / "tools/generate_crd.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tuple(tool.TARGETS) == COPIES


def test_references_unions_and_open_bounds_become_what_kubernetes_takes() -> None:
    assert structural_schema(Whole) == {
        "type": "object",
        "description": "A whole.",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "description": "Of it."},
            "part": {
                "type": "object",
                "description": "A part.",
                "default": {},
                "properties": {
                    "count": {
                        "type": "integer",
                        "description": "How many.",
                        "default": 2,
                        "minimum": 0,
                        "exclusiveMinimum": True,
                    }
                },
            },
            "note": {"type": "string", "description": "If any."},
        },
    }


def test_what_a_structural_schema_cannot_say_is_refused() -> None:
    class Either(ApiModel):
        """Either."""

        value: int | Part
        """One or the other."""

    with pytest.raises(SchemaError, match=r"Either\.value"):
        structural_schema(Either)


def test_every_field_has_a_sentence_and_every_node_one_type() -> None:
    for where, node in nodes(schema_of("spec")):
        assert "type" in node or node.get("x-kubernetes-int-or-string"), where
        if not where.endswith("[]"):
            assert node.get("description"), where
    for where, node in nodes(schema_of("status")):
        assert where.endswith("[]") or node.get("description"), where


def test_every_rule_says_what_to_write() -> None:
    rules = [rule for _, node in nodes(schema_of("spec")) for rule in node.get("x-kubernetes-validations", [])]
    assert len(rules) >= 12
    for rule in rules:
        assert ":" in rule["message"], rule


def test_no_replicas_by_default_so_that_a_pool_scales_by_itself() -> None:
    assert "default" not in schema_of("spec.replicas")
    assert definition()["spec"]["versions"][0]["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


def test_the_text_reads_back_as_the_definition() -> None:
    assert yaml.safe_load(definition_text()) == definition()


def test_engine_options_have_no_defaults_since_they_are_the_engines_own() -> None:
    assert not [name for name, node in schema_of("spec.engine")["properties"].items() if "default" in node]
