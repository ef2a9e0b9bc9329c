"""`pagestream-operator delete-pools`: delete EnginePools while there is an operator to drain them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pagestream_operator.commands.once import report, run_once, wait_until
from pagestream_operator.errors import Gone, Rejected
from pagestream_operator.kube.client import KubeClient, Object
from pagestream_operator.kube.kinds import POOL
from pagestream_operator.pool.deletion import breaks_definition, patch_deleted

_FREE_LIMIT_S = 15.0
"""For pools without finalizers: the API server alone deletes them."""


def delete_pools(arguments: Sequence[str]) -> None:
    """Run the command. Exits with status 1 and the reason if the API server refuses."""
    parser = argparse.ArgumentParser(
        prog="pagestream-operator delete-pools",
        description="Deletes EnginePools and waits until the operator has drained them; after the limit, without it.",
    )
    parser.add_argument("--namespaces", required=True, metavar="A,B", help="where to look")
    parser.add_argument("--selector", default="", metavar="LABELS", help="which pools; all unless given")
    parser.add_argument("--limit-s", type=float, default=120.0, metavar="SECONDS", help="for the operator to drain")
    options = parser.parse_args(arguments)
    namespaces = [name for name in options.namespaces.split(",") if name]
    if not namespaces:
        parser.error(f"--namespaces {options.namespaces!r} names no namespace: give one or more, separated by commas")
    run_once(lambda client: remove_pools(client, namespaces, options.selector, limit_s=options.limit_s))


async def remove_pools(client: KubeClient, namespaces: Sequence[str], selector: str, *, limit_s: float) -> list[str]:
    """Delete the pools that the selector finds.

    Returns:
        The pools (namespace/name) that the operator had not drained within the limit: their finalizers were removed.

    Raises:
        Rejected: the account may not.
        ApiUnavailable: the API server did not answer, even after the limit.
    """

    async def found() -> list[Object]:
        return [pool for namespace in namespaces for pool in await _pools(client, namespace, selector)]

    async def are_gone() -> bool:
        left = await found()
        refusal: Rejected | None = None
        for pool in left:
            if pool["metadata"].get("deletionTimestamp") is None:
                try:
                    await _delete(client, pool)
                except Rejected as error:
                    refusal = error  # the others first
        if refusal is not None:
            raise refusal
        return not left

    if await wait_until(are_gone, limit_s=limit_s):
        report("no pool is left")
        return []
    forced = []
    for pool in await found():
        name = _name(pool)
        report(f"{name} was not drained within {limit_s:g} s, its finalizers go: its engines still hand requests back")
        try:
            await patch_deleted(client, pool, {"finalizers": None})
        except Gone:
            report(f"{name} is gone")
        except Rejected as error:
            if not breaks_definition(error):
                raise
            report(f"{name} stays, correct what this names: {error}")
        forced.append(name)
    await wait_until(are_gone, limit_s=_FREE_LIMIT_S)
    return forced


async def _pools(client: KubeClient, namespace: str, selector: str) -> list[Object]:
    """List the pools of a namespace; none if EnginePool isn't defined any more."""
    try:
        return await client.list(POOL, namespace, selector)
    except Gone:
        return []


async def _delete(client: KubeClient, pool: Object) -> None:
    try:
        await client.delete(POOL, pool["metadata"]["namespace"], pool["metadata"]["name"])
    except Gone:
        return
    report(f"{_name(pool)} is being drained")


def _name(pool: Object) -> str:
    return f"{pool['metadata']['namespace']}/{pool['metadata']['name']}"
