"""Which release's operator serves a pool: `spec.controllerClass`, else the first one that has claimed it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from pagestream_operator.api import ConditionType, EnginePool
from pagestream_operator.fields import part
from pagestream_operator.pool.conditions import Finding

REFUSED = "ServedByAnother"
"""Reason of the condition that a refused operator writes."""


class Claim(Enum):
    """What an operator has to do with a pool."""

    OWN = "own"
    """It serves the pool."""
    FREE = "free"
    """It may serve the pool once it has written its release into the status."""
    REFUSED = "refused"
    """The pool names no release, and the operator of another one has claimed it first."""
    FOREIGN = "foreign"
    """The pool names another release."""

    @property
    def is_served(self) -> bool:
        """Whether the operator acts on the pool's objects."""
        return self in (Claim.OWN, Claim.FREE)


def claim_on(body: Mapping[str, Any], release: str) -> Claim:
    """Decide by a pool's object, whose spec may be invalid otherwise."""
    named, holder = part(body, "spec", "controllerClass"), part(body, "status", "controllerClass")
    if named not in (None, release):
        return Claim.FOREIGN
    if holder == release:
        return Claim.OWN
    return Claim.FREE if named == release or holder is None else Claim.REFUSED


def is_claimed(body: Mapping[str, Any], release: str) -> bool:
    """Whether a release's operator has claimed a pool, and has put its finalizer there, wherever the pool is now."""
    return bool(release == (part(body, "status", "controllerClass") or part(body, "spec", "controllerClass")))


def contested(pool: EnginePool, release: str) -> Finding:
    """The condition that a refused operator writes."""
    holder = pool.status.controller_class
    return Finding(
        ConditionType.CONTESTED,
        True,
        REFUSED,
        f"the operator of {holder} serves this pool, and that of {release} sees it, too: "
        f"set spec.controllerClass to {holder} to keep it there, or to {release} to move it",
    )
