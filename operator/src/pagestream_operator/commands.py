"""What a Helm hook runs once: `pagestream-operator apply-crd`, `delete-pools` and `release-pools`.

- `apply-crd` brings the definition of EnginePool up to date. Helm installs what lies in a chart's crds/ once and never
  changes it. Server-side apply takes the definition over, fields that are no longer in it included (a CRD's list of
  versions belongs to one manager as a whole).
- `delete-pools` deletes pools while there is an operator to drain them.
- `release-pools` lets pools go whose operator is gone.

What is refused for one pool is tried for the others all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pagestream_operator.crd import definition
from pagestream_operator.errors import ApiUnavailable, Gone, OperatorError, Rejected
from pagestream_operator.kube.client import KubeClient, Object
from pagestream_operator.kube.kinds import DEFINITION, POOL
from pagestream_operator.pool.deletion import FINALIZER, breaks_definition, patch_deleted, remove_finalizer
from pagestream_operator.pool.ownership import is_claimed

FIELD_MANAGER = "pagestream-crd"


def apply_crd(arguments: Sequence[str]) -> None:
    """Run the command. Exits with status 1 and the reason if the definition can't be applied."""
    parser = argparse.ArgumentParser(
        prog="pagestream-operator apply-crd", description="Applies the definition of EnginePool, and waits for it."
    )
    parser.add_argument("--limit-s", type=float, default=60.0, metavar="SECONDS", help="until it is established")
    options = parser.parse_args(arguments)
    run_once(lambda client: apply_definition(client, definition(), limit_s=options.limit_s))


async def apply_definition(client: KubeClient, crd: dict[str, Any], *, limit_s: float) -> None:
    """Apply a definition, and wait until the API server serves it.

    Raises:
        Rejected: the account may not, or the definition is wrong.
        ApiUnavailable: the API server did not answer within the limit, or did not establish the definition.
    """
    name = crd["metadata"]["name"]

    async def apply() -> bool:
        await client.apply(DEFINITION, crd, manager=FIELD_MANAGER)
        return True

    try:
        await wait_until(apply, limit_s=limit_s)
    except Rejected as error:
        raise Rejected(
            f"{error}; apply it by hand as an administrator: kubectl apply --server-side -f crds/", error.status
        ) from error
    if not await wait_until(lambda: _is_established(client, name), limit_s=limit_s):
        raise ApiUnavailable(f"{name} was applied, and is not established after {limit_s:g} s")
    report(f"{name} is up to date")


async def _is_established(client: KubeClient, name: str) -> bool:
    try:
        found = await client.get(DEFINITION, None, name)
    except Gone:
        return False
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(condition["type"] == "Established" and condition["status"] == "True" for condition in conditions)


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


def release_pools(arguments: Sequence[str]) -> None:
    """Run the command. Exits with status 1 and the reason if the API server refuses."""
    parser = argparse.ArgumentParser(
        prog="pagestream-operator release-pools",
        description="Removes the operator's finalizer from the EnginePools of a release that is deleted.",
    )
    parser.add_argument("--release", required=True, metavar="NAMESPACE.NAME", help="as in a pool's controllerClass")
    options = parser.parse_args(arguments)
    run_once(lambda client: remove_finalizers(client, options.release))


async def remove_finalizers(client: KubeClient, release: str) -> list[str]:
    """Remove the finalizer from all pools that the release's operator has claimed.

    Returns:
        These pools (namespace/name).

    Raises:
        ApiFailure: the API server refuses, for one pool at least, or doesn't answer.
    """
    try:
        found = await client.list(POOL, None)
    except Gone:
        return []  # EnginePool isn't defined any more
    released: list[str] = []
    refusal: Rejected | None = None
    for body in found:
        if is_claimed(body, release) and FINALIZER in (body["metadata"].get("finalizers") or []):
            name = _name(body)
            try:
                await remove_finalizer(client, body)
            except Rejected as error:
                report(
                    f"{name} keeps its finalizer, and would stay when it is deleted, correct what this names: {error}"
                )
                refusal = error
                continue
            report(f"{name} stays, and no operator serves it: it can be deleted, and its models stay listed")
            released.append(name)
    if refusal is not None:
        raise refusal
    return released


POLL_S = 0.5
_REQUEST_S = 10.0


def run_once(act: Callable[[KubeClient], Awaitable[object]]) -> None:
    """Run `act` with a client. An error of the operator ends the process with status 1 and the error's text."""

    async def run() -> None:
        async with KubeClient(_REQUEST_S) as client:
            await act(client)

    try:
        asyncio.run(run())
    except OperatorError as error:
        sys.exit(f"pagestream-operator: {error}")


async def wait_until(condition: Callable[[], Awaitable[bool]], *, limit_s: float) -> bool:
    """Ask every `POLL_S` until the condition holds. Returns False when it doesn't hold at the limit.

    Raises:
        ApiUnavailable: the API server did not answer the last time.
    """
    end = time.monotonic() + limit_s
    while True:
        try:
            if await condition():
                return True
            if time.monotonic() > end:
                return False
        except ApiUnavailable as error:
            if time.monotonic() > end:
                raise
            report(f"asking again: {error}")
        await asyncio.sleep(POLL_S)


def report(text: str) -> None:
    """Write a line to the Job's log."""
    sys.stderr.write(f"pagestream-operator: {text}\n")
    sys.stderr.flush()
