"""`pagestream-operator apply-crd`: brings the definition of EnginePool up to date.

Helm installs what lies in a chart's crds/ once and never changes it. Server-side apply takes the definition over,
fields that are no longer in it included (a CRD's list of versions belongs to one manager as a whole).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from lightkube import Client
from lightkube.resources.apiextensions_v1 import CustomResourceDefinition
from lightkube.types import PatchType

from pagestream_operator.crd import definition
from pagestream_operator.errors import ApiUnavailable, Gone, Rejected
from pagestream_operator.hooks.client import open_client, say, told_as_exit, translated, wait_until


def apply_crd(arguments: Sequence[str]) -> None:
    """Runs the command. Exits with 1 and a sentence where the definition can't be applied."""
    parser = argparse.ArgumentParser(
        prog="pagestream-operator apply-crd", description="Applies the definition of EnginePool, and waits for it."
    )
    parser.add_argument("--limit-s", type=float, default=60.0, metavar="SECONDS", help="until it is established")
    options = parser.parse_args(arguments)
    with told_as_exit(), open_client() as client:
        apply_definition(client, definition(), limit_s=options.limit_s)


def apply_definition(client: Client, crd: dict[str, Any], *, limit_s: float) -> None:
    """Applies a definition, and waits until the API server serves it.

    Raises:
        Rejected: the account may not, or the definition is wrong.
        ApiUnavailable: the API server did not answer within the limit, or did not establish the definition.
    """
    name = crd["metadata"]["name"]

    def apply() -> bool:
        with translated(f"applying {name}"):
            client.patch(CustomResourceDefinition, name, crd, patch_type=PatchType.APPLY, force=True)
        return True

    try:
        wait_until(apply, limit_s=limit_s)
    except Rejected as error:
        raise Rejected(
            f"{error}; apply it by hand as an administrator: kubectl apply --server-side -f crds/", error.status
        ) from error
    if not wait_until(lambda: _is_established(client, name), limit_s=limit_s):
        raise ApiUnavailable(f"{name} was applied, and is not established after {limit_s:g} s")
    say(f"{name} is up to date")


def _is_established(client: Client, name: str) -> bool:
    try:
        with translated(f"reading {name}"):
            found = client.get(CustomResourceDefinition, name)
    except Gone:
        return False
    conditions = (found.status and found.status.conditions) or ()
    return any(condition.type == "Established" and condition.status == "True" for condition in conditions)
