"""x"""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from support.kubernetes.chart import CHART

# -- The chart's values against their schema and their README, without helm


VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
# Where Kubernetes itself takes any name, and places that others check: the collector, Helm, and gateways their issuers.
TENANTS = ("tenantWeights", "tenantLogLimits")
CLAIMS = ("tenants", "classes", "required_claims")
OPEN = ("strings", "fragment", "quantities", "hashes", "pools", *TENANTS, *CLAIMS, "exporters", "global", "keys")


def objects(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every schema of an object, with the keys that lead there."""
    if isinstance(schema, dict):
        if schema.get("type") == "object" or "properties" in schema:
            yield path, schema
        for key, value in schema.items():
            yield from objects(value, (*path, key))
    elif isinstance(schema, list):
        for value in schema:
            yield from objects(value, path)


def leaves(values: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, (*path, key))
    else:
        yield path


def test_the_schema_is_one() -> None:
    validator_for(SCHEMA).check_schema(SCHEMA)


def test_the_default_values_are_valid() -> None:
    Draft202012Validator(SCHEMA).validate(VALUES)


@pytest.mark.parametrize("path", sorted((CHART / "ci").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_sets_of_values_are_valid(path: Any) -> None:
    Draft202012Validator(SCHEMA).validate(merged(VALUES, yaml.safe_load(path.read_text())))


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """As helm lays values over the chart's own: null takes a key away."""
    result = {key: value for key, value in below.items() if above.get(key, value) is not None}
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            result[key] = merged(below[key], value)
        elif value is not None:
            result[key] = value
    return result


def test_every_object_is_closed() -> None:
    """Unknown keys are errors wherever the chart or the pool's definition knows them all."""
    open_ones = [
        "/".join(path)
        for path, schema in objects(SCHEMA)
        if schema.get("additionalProperties") not in (False,) and path[-1] not in OPEN
        if "enginePoolSpec" not in path
    ]
    assert open_ones == []


def test_every_default_value_has_a_schema() -> None:
    """A key that is only in values.yaml would be refused; this names it."""
    unknown = list(Draft202012Validator(SCHEMA).iter_errors(VALUES))
    assert unknown == []
    for path in leaves({key: value for key, value in VALUES.items() if key != "pools"}):
        assert schema_at(path) is not None, path


def schema_at(path: tuple[str, ...]) -> Any:
    schema: Any = SCHEMA
    for key in path:
        while "$ref" in schema:
            schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
        schema = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
        if schema is True:  # a part of a pod
            return {}
        if not isinstance(schema, dict):
            return None
    return schema


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gatway": {}}, "'gatway' was unexpected"),
        ({"gateway": {"replica": 2}}, "'replica' was unexpected"),
        ({"pools": {"demo": {"maxReplica": 2}}}, "'maxReplica' was unexpected"),
        ({"pools": {"demo": {"replicas": 2}}}, "'replicas' was unexpected"),
        ({"broker": {"retention": 600}}, "'retention' was unexpected"),
        ({"gateway": {"resources": {"limit": {}}}}, "'limit' was unexpected"),
        ({"networkPolicy": {"clients": [{"podselector": {}}]}}, "'podselector' was unexpected"),
        ({"apiKeys": {"hashes": {"secret": "team"}}}, "'secret' does not match"),
        ({"redis": {"external": {"url": "http://redis"}}}, "does not match"),
        ({"redis": {"bundled": {"appendfsync": "no"}}}, "is not one of"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    messages = [leaf for error in Draft202012Validator(SCHEMA).iter_errors(change) for leaf in messages_of(error)]
    assert any(message in each for each in messages), messages


def messages_of(error: Any) -> list[str]:
    return [error.message, *(message for inner in error.context or () for message in messages_of(inner))]


def test_every_value_is_in_the_readme_with_a_description() -> None:
    rows = [row.split(" | ") for row in (CHART / "README.md").read_text().splitlines() if row.startswith("| ")]
    described = {row[0].removeprefix("| "): row[3] for row in rows}
    documented = {name for name, text in described.items() if text.strip(" |")}
    for path in leaves(VALUES):
        # A list or object may be described as a whole.
        assert documented & {".".join(path[:length]) for length in range(1, len(path) + 1)}, ".".join(path)


# -- Files that are made from others are as they would be made now


TOOL: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "generate_chart.py"))


@pytest.mark.parametrize("part", ["schema", "groups", "dashboards"])
def test_is_up_to_date(part: str) -> None:
    for path, text in TOOL["PARTS"][part]().items():
        assert path.read_text() == text, f"run tools/generate_chart.py {part}"


def test_the_pools_schema_has_the_fields_of_the_definition_but_replicas() -> None:
    properties = json.loads(TOOL["schema_text"]())["$defs"]["enginePoolSpec"]["properties"]
    assert {"model", "engine", "template", "scaling", "minReplicas", "maxReplicas"} <= set(properties)
    assert "replicas" not in properties
