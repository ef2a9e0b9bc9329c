"""Writes the chart's generated files: the pools' schema, the groups of values, dashboards, README, and the collector's
configuration.

README and collector need helm-docs and helm on the PATH; `python tools/generate_chart.py schema groups dashboards`
writes the others.
"""

import json
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pagestream_streams import StreamsSettings

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "pagestream"
SCHEMA = CHART / "values.schema.json"
README = CHART / "README.md"
GROUPS = CHART / "files" / "groups.txt"
COLLECTOR = ROOT / "deploy" / "otel" / "collector.yaml"
DASHBOARDS = CHART / "files" / "dashboards"

_COLLECTOR_HEADER = """\
# Made by tools/generate_chart.py from helm/pagestream/files/collector.yaml: what the chart's collector runs with by
# default, for a release `pagestream` in the namespace `pagestream`. Take it for a collector of your own: what matters
# is that every operator replica gets all metrics, under its stable name. It needs the receiver otlp; the processors
# batch, filter and memory_limiter; the exporters otlp_grpc and prometheus; the extension health_check.
"""
_LINE_CHARACTERS = 150
_RESOURCES = "resources"
"""Definition of the schema whose value may be null: none are asked for then."""


def schema_text() -> str:
    """Return values.schema.json with the pools' part from the CRD, since Helm drops fields that a CRD does not have."""
    crd = yaml.safe_load((CHART / "crds" / "enginepools.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    pool = _closed(spec)
    del pool["properties"]["replicas"]  # set by the operator, or by `kubectl scale` to pin a pool
    schema = json.loads(SCHEMA.read_text())
    schema["$defs"]["enginePoolSpec"] = pool
    schema["properties"]["broker"] = _broker_schema()
    return _compact(schema) + "\n"


def groups_text() -> str:
    """Return the paths of the groups of values, outer ones first, which templates read without asking whether they are
    there.
    """
    schema = json.loads(SCHEMA.read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    return "".join(f"{path}\n" for path in _groups(values, schema, schema["$defs"]))


def _groups(values: dict[str, Any], schema: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        part = schema["properties"][key]
        name = part.get("$ref", "").rpartition("/")[2]
        part = definitions[name] if name else part
        if "properties" not in part:
            continue  # anything may be in it
        if isinstance(value, dict) and value and name != _RESOURCES:
            yield key
            yield from (f"{key}.{path}" for path in _groups(value, part, definitions))


def readme_text() -> str:
    """Return README.md, generated from the comments in values.yaml."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("Chart.yaml", "values.yaml", "README.md.gotmpl"):
            shutil.copy(CHART / name, folder)
        command = ["helm-docs", "--chart-search-root", folder, "--log-level", "warning", "--sort-values-order", "file"]
        subprocess.run(command, check=True)
        return Path(folder, "README.md").read_text()


def collector_text() -> str:
    """Return the collector's configuration, as in the chart's ConfigMap."""
    command = ["helm", "template", "pagestream", str(CHART), "--namespace", "pagestream", "--kube-version", "1.34"]
    command += ["--show-only", "templates/collector/configmap.yaml"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    config: str = yaml.safe_load(text)["data"]["config.yaml"]
    return _COLLECTOR_HEADER + config


def dashboard_texts() -> dict[Path, str]:
    """Return the dashboards' files."""
    made = runpy.run_path(str(ROOT / "deploy" / "grafana" / "dashboards.py"))
    return {DASHBOARDS / name: made["text_of"](dashboard) for name, dashboard in made["DASHBOARDS"].items()}


PARTS: dict[str, Callable[[], dict[Path, str]]] = {
    "schema": lambda: {SCHEMA: schema_text()},
    "groups": lambda: {GROUPS: groups_text()},
    "dashboards": dashboard_texts,
    "readme": lambda: {README: readme_text()},
    "collector": lambda: {COLLECTOR: collector_text()},
}


def _broker_schema() -> dict[str, Any]:
    """Return the settings of the durable streams, in camelCase."""
    known: dict[Any, dict[str, Any]] = {
        bool: {"type": "boolean"},
        str: {"type": "string", "pattern": "^[A-Za-z0-9._-]{0,128}$"},
        int: {"type": "integer", "minimum": 0},
        float: {"type": "number", "minimum": 0},
    }
    weights = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}}
    properties = {camel_case(name): known.get(kind, weights) for name, kind in get_type_hints(StreamsSettings).items()}
    return {"type": "object", "additionalProperties": False, "properties": properties}


def camel_case(field: str) -> str:
    """Convert `lease_ms` to `leaseMs`."""
    first, *others = field.split("_")
    return first + "".join(part.title() for part in others)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a structural schema as JSON Schema that forbids unknown keys; the API server checks its rules."""
    made: dict[str, Any] = {}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    for key, value in schema.items():
        if key == "properties":
            made["properties"] = {name: _closed(part) for name, part in value.items()}
            made["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            made[key] = _closed(value)
        elif key in (
            "type",
            "enum",
            "pattern",
            "required",
            "minimum",
            "maximum",
            "minItems",
            "maxItems",
            "minLength",
            "maxLength",
        ):
            made[key] = value
    if schema.get("nullable") and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
    return made


def _compact(value: Any, indent: int = 0) -> str:
    """Return JSON in which short values are on one line."""
    line = json.dumps(value)
    if indent + len(line) <= _LINE_CHARACTERS or not isinstance(value, dict | list):
        return line
    pad = " " * (indent + 2)
    if isinstance(value, dict):
        parts = [f"{pad}{json.dumps(key)}: {_compact(part, indent + 2)}" for key, part in value.items()]
        return "{\n" + ",\n".join(parts) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(pad + _compact(part, indent + 2) for part in value) + "\n" + " " * indent + "]"


def main() -> None:
    """Write the parts that are named, or all."""
    for name in sys.argv[1:] or PARTS:
        for path, text in PARTS[name]().items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    main()
