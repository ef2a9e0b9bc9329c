"""Pools that break the definition of today, on an API server that doesn't let them pass: one without ratcheting of
validation, where every change of such an object is refused, that of its finalizers, too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import yaml
from support.kubernetes.api import run_tool
from support.kubernetes.control_plane import ControlPlane, Refused, eventually
from support.kubernetes.operator_process import DEFINITION, OperatorProcess, PoolWorld, running_operator

pytestmark = pytest.mark.kube

STRICT = yaml.safe_load(DEFINITION.read_text())
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_TIGHTENED = ("x-kubernetes-validations", "pattern", "minimum", "maximum", "enum")
ODD = {
    "quantity": {"template": {"resources": {"requests": {"memory": "lots"}}}},
    "percent": {"rollout": {"maxSurge": "ten%"}},
    "source": {"model": {"source": {"path": "models/demo"}}},
}
"""What of a spec earlier definitions have let pass, by the pool's name."""
SILENT = {"Foreground": "silent", "Orphan": "orphan"}
"""Odd pools that have published nothing, by how they are deleted: the operator has no finalizer there."""

BARE = {"bare": "Succeeded", "stuck": "Failed"}
"""Odd pools that have published their models, and have lost the finalizer since, by how their Jobs' pods end."""


def loosened(schema: Any) -> Any:
    """A schema without what could have been added to it since."""
    if isinstance(schema, dict):
        return {
            name: loosened(value) for name, value in schema.items() if name not in _TIGHTENED or isinstance(value, dict)
        }
    return [loosened(each) for each in schema] if isinstance(schema, list) else schema


@pytest.fixture(scope="module")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An API server whose administrator has turned ratcheting off, and an earlier definition."""
    options = ("--emulated-version=1.31", "--feature-gates=CRDValidationRatcheting=false")
    with ControlPlane(tmp_path_factory.mktemp("kube"), controllers=True, options=options) as kube:
        definition = copy.deepcopy(STRICT)
        for version in definition["spec"]["versions"]:
            version["schema"] = loosened(version["schema"])
        kube.post(DEFINITIONS, definition)
        eventually(lambda: kube.exists("/apis/pagestream.dev/v1alpha1/enginepools"), "EnginePool is served")
        yield kube


@pytest.fixture(scope="module")
def stored(kube: ControlPlane) -> PoolWorld:
    """The definition of today, and pools: some that have published their models, some of them odd or without their
    finalizer, and odd ones that have published nothing.
    """
    world = PoolWorld(kube, "stored")
    with running_operator(kube, "stored"):
        for name in (*ODD, *BARE, "good"):
            world.create(name, minReplicas=1)
            world.make_ready(name)
            eventually(partial(_card_of, world, name), f"the card of {name}")
        for name in SILENT.values():
            world.create(name, minReplicas=1)
            world.wait_condition("Ready", "NoEngine", name)
    odd = {**ODD, **dict.fromkeys((*SILENT.values(), *BARE), ODD["quantity"])}
    for name, spec in odd.items():
        world.change(spec, name)
    for name in BARE:
        world.kube.merge(world.path("enginepools", name), {"metadata": {"finalizers": None}})
    path = f"{DEFINITIONS}/{STRICT['metadata']['name']}"
    version = kube.get(path)["metadata"]["resourceVersion"]
    kube.request("PUT", path, {**STRICT, "metadata": {**STRICT["metadata"], "resourceVersion": version}})
    for name in odd:
        eventually(partial(_is_refused, world, name), f"no change of {name} is taken")
    return world


def _card_of(world: PoolWorld, name: str) -> str:
    return str(world.pool(name).get("status", {}).get("publishedCard") or "")


def _is_refused(world: PoolWorld, name: str) -> bool:
    try:
        world.kube.merge(world.path("enginepools", name), {"metadata": {"labels": {"seen": "yes"}}})
    except Refused as error:
        return error.status == 422
    return False


@pytest.fixture(scope="module")
def operator(kube: ControlPlane, stored: PoolWorld) -> Iterator[OperatorProcess]:
    with running_operator(kube, "stored") as operator:
        eventually(operator.leads, "an operator that leads")
        yield operator


def test_the_others_are_served_and_an_event_says_what_to_correct(operator: OperatorProcess, stored: PoolWorld) -> None:
    stored.change({"replicas": 2}, "good")
    stored.wait_replicas(2, "good")
    note = eventually(
        lambda: next(iter(each for each in stored.events("ChangeRefused") if "maxSurge" in each), ""), "an event"
    )
    assert "the status can't be written" in note
    assert "write `1` or `25%`" in note
    stored.wait_condition("Degraded", "Rejected", "quantity")


@pytest.mark.parametrize(("name", "propagation"), [("quantity", "Background"), ("source", "Foreground")])
def test_they_are_deleted_like_others(
    operator: OperatorProcess, stored: PoolWorld, name: str, propagation: str
) -> None:
    """In the foreground garbage collection has to remove a finalizer as well."""
    stored.kube.delete(stored.path("enginepools", name), propagationPolicy=propagation)
    eventually(lambda: _has_ended(stored, name), f"the Job of {name}")
    stored.end_job(f"{name}-unpublish", "Succeeded")
    eventually(lambda: stored.end_pods(name) or not _exists(stored, name), f"{name} is gone")  # type: ignore[func-returns-value]
    drained = [event for event in stored.kube.get(stored.path("events"))["items"] if event["reason"] == "Drained"]
    assert [event["regarding"]["name"] for event in drained].count(name) == 1


@pytest.mark.parametrize("name", BARE)
def test_one_without_its_finalizer_is_unpublished_once_it_is_gone(
    operator: OperatorProcess, stored: PoolWorld, name: str
) -> None:
    """The server refuses to add it, and takes the pool away at once: that is said, and a Job of no owner follows."""
    eventually(lambda: name in _named(stored, "ChangeRefused"), "an event that the finalizer can't be added")
    stored.kube.delete(stored.path("enginepools", name), propagationPolicy="Background")
    eventually(lambda: not _exists(stored, name), f"{name} is gone")
    eventually(lambda: name in _named(stored, "FinalizerMissing"), "an event that it had no finalizer")
    eventually(lambda: _has_ended(stored, name), f"the Job of {name}")
    stored.end_job(f"{name}-unpublish", BARE[name], exit_code=0 if BARE[name] == "Succeeded" else 3)
    ending, other = ("Unpublished", "UnpublishFailed")[:: 1 if BARE[name] == "Succeeded" else -1]
    eventually(lambda: name in _named(stored, ending), f"an event {ending}")
    assert name not in _named(stored, other)


@pytest.mark.parametrize("propagation", SILENT)
def test_garbage_collection_can_remove_its_finalizer(
    operator: OperatorProcess, stored: PoolWorld, propagation: str
) -> None:
    """Of a pool that has published nothing it is the only one."""
    name = SILENT[propagation]
    assert "finalizers" not in stored.pool(name)["metadata"]
    stored.kube.delete(stored.path("enginepools", name), propagationPolicy=propagation)
    eventually(lambda: stored.end_pods(name) or not _exists(stored, name), f"{name} is gone")  # type: ignore[func-returns-value]
    orphaned = stored.kube.exists(stored.path("deployments", f"{name}-engine"))
    assert orphaned == (propagation == "Orphan")


def test_a_release_that_is_uninstalled_leaves_none(stored: PoolWorld) -> None:
    """Without an operator, as by the chart's hook."""
    environment = {"KUBECONFIG": str(stored.kube.kubeconfig)}
    arguments = ("delete-pools", "--namespaces", stored.namespace, "--limit-s", "0")
    assert _exists(stored, "percent")
    run_tool(sys.executable, "-m", "pagestream_operator", *arguments, environment=environment)
    assert not any(_exists(stored, name) for name in (*ODD, "good"))


def _named(world: PoolWorld, reason: str) -> list[str]:
    """The pools that events with a reason are about."""
    events = world.kube.get(world.path("events"))["items"]
    return [event["regarding"]["name"] for event in events if event["reason"] == reason]


def _exists(world: PoolWorld, name: str) -> bool:
    return world.kube.exists(world.path("enginepools", name))


def _has_ended(world: PoolWorld, name: str) -> bool:
    """End the pods of a pool; returns whether its models are being unpublished."""
    world.end_pods(name)
    return world.kube.exists(world.path("jobs", f"{name}-unpublish"))
