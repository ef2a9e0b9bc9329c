"""`pagestream-operator release-pools`: let pools go whose operator is gone."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pagestream_operator.commands.once import report, run_once
from pagestream_operator.errors import Gone, Rejected
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import POOL
from pagestream_operator.pool.contest import is_claimed
from pagestream_operator.pool.deletion import FINALIZER, remove_finalizer


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
            name = f"{body['metadata']['namespace']}/{body['metadata']['name']}"
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
