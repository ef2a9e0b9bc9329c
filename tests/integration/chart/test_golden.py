"""What the chart renders, kept in files small enough to read: a change of the chart shows here as a change of them.

UPDATE_GOLDEN=1 writes them; review the difference.
"""

import os
import re
from pathlib import Path

import pytest
import yaml
from support.kubernetes.api import Administrator
from support.kubernetes.chart import CHART, Manifest, is_hook, one, render, values_files

GOLDEN = Path(__file__).with_name("golden")
MATRIX = {path.stem: ("--values", str(path)) for path in values_files()} | {"default": ()}
PARTS = {
    "gateway.yaml": ("Deployment", "pagestream-gateway"),
    "pool.yaml": ("EnginePool", "demo"),
    "operator-rights.yaml": ("Role", "pagestream-operator"),
    "redis-config.yaml": ("ConfigMap", "pagestream-redis"),
}


def check(name: str, text: str) -> None:
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.read_text() == text, f"{name} differs; UPDATE_GOLDEN=1 writes it"


def line_of(manifest: Manifest) -> str:
    metadata = manifest["metadata"]
    line = f"{manifest['kind']} {metadata['name']}"
    if is_hook(manifest):
        line += f" (hook {metadata['annotations']['helm.sh/hook']})"
    return line + (f" in {metadata['namespace']}" if "namespace" in metadata else "")


@pytest.mark.parametrize("values", MATRIX)
def test_the_objects_of_each_set_of_values(values: str) -> None:
    lines = sorted(line_of(manifest) for manifest in render(*MATRIX[values]))
    check(f"objects-{values}.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", PARTS)
def test_the_parts_that_matter_most(name: str) -> None:
    manifest = one(render(), *PARTS[name])
    text = yaml.safe_dump(manifest, sort_keys=False, width=120)
    check(name, re.sub(r"(checksum/\w+): [0-9a-f]{64}", r"\1: ...", text))


@pytest.mark.parametrize("values", ["default", "gitops"])
def test_the_notes(values: str, admin: Administrator) -> None:
    command = ("helm", "install", "pagestream", str(CHART), "--dry-run=server", "--namespace", "default")
    text = admin.run(*command, *MATRIX[values]).partition("\nNOTES:\n")[2]
    check(f"notes-{values}.txt", text)
