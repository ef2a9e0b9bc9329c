"""The chart, rendered by the real helm."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from kube_api import COMMAND_LIMIT_S, kube_binary

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "pagestream"
KUBE_VERSION = "1.34"
NAMESPACE = "llm"
RELEASE = "pagestream"

Manifest = dict[str, Any]


class RenderError(AssertionError):
    """Helm refused; the message is what a user reads."""


def render(*options: str, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Manifest]:
    """The objects of `helm template`, hooks and tests included. Raises RenderError."""
    command = ["template", release, str(CHART), "--namespace", namespace, "--kube-version", KUBE_VERSION, *options]
    result = subprocess.run(
        [kube_binary("helm"), *command], capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False
    )
    if result.returncode:
        raise RenderError(result.stderr)
    return [manifest for manifest in yaml.load_all(result.stdout, _LOADER) if manifest]


def values_files() -> list[Path]:
    """The sets of values that are kept beside the chart, for tests."""
    return sorted((CHART / "ci").glob("*.yaml"))


def one(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """The object of that kind and name."""
    found = [manifest for manifest in manifests if manifest["kind"] == kind and manifest["metadata"]["name"] == name]
    if len(found) != 1:
        raise AssertionError(f"{len(found)} objects are {kind} {name}, 1 was expected")
    return found[0]


def is_hook(manifest: Manifest) -> bool:
    """Whether helm runs it at an event, rather than keeping it."""
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})


def pod_templates(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Pods and pod templates (metadata, spec) by `kind/name` of what holds them."""
    found = {}
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] == "Pod":
            found[name] = manifest
        elif "template" in manifest.get("spec", {}) and manifest["kind"] in ("Deployment", "StatefulSet", "Job"):
            found[name] = manifest["spec"]["template"]
    return found


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
