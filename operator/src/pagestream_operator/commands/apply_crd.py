"""`pagestream-operator apply-crd`: bring the definition of EnginePool up to date.

Helm installs what lies in a chart's crds/ once and never changes it. Server-side apply takes the definition over,
fields that are no longer in it included (a CRD's list of versions belongs to one manager as a whole).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pagestream_operator.commands.once import report, run_once, wait_until
from pagestream_operator.crd import definition
from pagestream_operator.errors import ApiUnavailable, Gone, Rejected
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.kinds import DEFINITION

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
