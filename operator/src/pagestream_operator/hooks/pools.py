"""`pagestream-operator delete-pools`: takes EnginePools away while there is an operator to drain them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lightkube import Client
from lightkube.generic_resource import create_namespaced_resource
from lightkube.types import PatchType

from pagestream_operator.api.base import GROUP, KIND, PLURAL, VERSION
from pagestream_operator.errors import Gone
from pagestream_operator.hooks.client import open_client, say, told_as_exit, translated, wait_until

_EnginePool = create_namespaced_resource(GROUP, VERSION, KIND, PLURAL)
_FREE_LIMIT_S = 15.0  # for pools whose finalizers were taken away: nobody has to do anything more


def delete_pools(arguments: Sequence[str]) -> None:
    """Runs the command. Exits with 1 and a sentence where the API server refuses."""
    parser = argparse.ArgumentParser(
        prog="pagestream-operator delete-pools",
        description="Deletes EnginePools and waits until the operator has drained them; after the limit, without it.",
    )
    parser.add_argument("--namespaces", required=True, metavar="A,B", help="where to look")
    parser.add_argument("--selector", default="", metavar="LABELS", help="which pools; all unless given")
    parser.add_argument("--limit-s", type=float, default=120.0, metavar="SECONDS", help="for the operator to drain")
    options = parser.parse_args(arguments)
    with told_as_exit(), open_client() as client:
        remove_pools(client, options.namespaces.split(","), options.selector, limit_s=options.limit_s)


def remove_pools(client: Client, namespaces: Sequence[str], selector: str, *, limit_s: float) -> list[str]:
    """Deletes the pools that the selector finds; returns those (namespace/name) that had to go without an operator.

    Raises:
        Rejected: the account may not.
        ApiUnavailable: the API server did not answer, even after the limit.
    """

    def found() -> list[Any]:
        return [pool for namespace in namespaces for pool in _pools(client, namespace, selector)]

    def are_gone() -> bool:
        left = found()
        for pool in left:
            if pool.metadata.deletionTimestamp is None:
                _delete(client, pool)
        return not left

    if wait_until(are_gone, limit_s=limit_s):
        say("no pool is left")
        return []
    forced = []
    for pool in found():
        name = f"{pool.metadata.namespace}/{pool.metadata.name}"
        say(f"{name} was not drained within {limit_s:g} s; it goes without: its engines hand back what they run anyway")
        _free(client, pool)
        forced.append(name)
    wait_until(are_gone, limit_s=_FREE_LIMIT_S)
    return forced


def _pools(client: Client, namespace: str, selector: str) -> list[Any]:
    """None where the definition itself is gone."""
    try:
        with translated(f"listing the pools of {namespace}"):
            return list(client.list(_EnginePool, namespace=namespace, labels=_labels(selector)))
    except Gone:
        return []


def _labels(selector: str) -> dict[str, Any]:
    """The equalities of a selector."""
    pairs = (part.partition("=") for part in selector.split(",") if part)
    return {name: value for name, _, value in pairs}


def _delete(client: Client, pool: Any) -> None:
    metadata = pool.metadata
    try:
        with translated(f"deleting {metadata.namespace}/{metadata.name}"):
            client.delete(_EnginePool, metadata.name, namespace=metadata.namespace)
    except Gone:
        return
    say(f"{metadata.namespace}/{metadata.name} is being drained")


def _free(client: Client, pool: Any) -> None:
    """Takes the finalizers away."""
    metadata = pool.metadata
    patch = {"metadata": {"finalizers": None}}
    try:
        with translated(f"taking the finalizers of {metadata.namespace}/{metadata.name}"):
            client.patch(_EnginePool, metadata.name, patch, namespace=metadata.namespace, patch_type=PatchType.MERGE)
    except Gone:
        return
