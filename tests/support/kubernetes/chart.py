"""The chart, rendered by the real helm."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from support.kubernetes.api import run_tool

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "pagestream"
KUBE_VERSION = "1.34"
NAMESPACE = "llm"
RELEASE = "pagestream"

Manifest = dict[str, Any]

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def rendered_text(*options: str, release: str = RELEASE, namespace: str = NAMESPACE) -> str:
    """What `helm template` prints, hooks and tests included. CommandError with what a user reads where it refuses."""
    where = ("--namespace", namespace, "--kube-version", KUBE_VERSION)
    return run_tool("helm", "template", release, str(CHART), *where, *options)


def render(*options: str, release: str = RELEASE, namespace: str = NAMESPACE) -> list[Manifest]:
    """The objects of `helm template`."""
    text = rendered_text(*options, release=release, namespace=namespace)
    return [manifest for manifest in yaml.load_all(text, _LOADER) if manifest]


def values_files() -> list[Path]:
    """The sets of values that are kept beside the chart, for tests."""
    return sorted((CHART / "ci").glob("*.yaml"))


def one(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """The object of that kind and name."""
    found = [manifest for manifest in manifests if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)]
    if len(found) != 1:
        raise AssertionError(f"{len(found)} objects are {kind} {name}, 1 was expected")
    return found[0]


def is_hook(manifest: Manifest) -> bool:
    """Whether helm runs it at an event, rather than keeping it."""
    return "helm.sh/hook" in manifest["metadata"].get("annotations", {})


def pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Pods, and the pods (metadata, spec) that a template makes, by `kind/name` of what holds them."""
    found = {}
    for manifest in manifests:
        name = f"{manifest['kind']}/{manifest['metadata']['name']}"
        if manifest["kind"] == "Pod":
            found[name] = manifest
        elif manifest["kind"] in ("Deployment", "StatefulSet", "Job"):
            found[name] = manifest["spec"]["template"]
    return found
