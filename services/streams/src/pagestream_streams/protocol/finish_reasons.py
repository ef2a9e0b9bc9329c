"""Names of finish reasons: what Redis, the HTTP API and the engine call a value of the proto enum `FinishReason`.

A name is the enum value's without its prefix, in lower case: FINISH_REASON_STOP is "stop". Lua scripts write names
too, so they are part of the stored form.
"""

from __future__ import annotations

from typing import cast

from pagestream.v1.inference_pb2 import FinishReason

_PREFIX = "FINISH_REASON_"

FINISH_REASONS: dict[str, FinishReason] = {
    name.removeprefix(_PREFIX).lower(): cast("FinishReason", value) for name, value in FinishReason.items() if value
}
"""Every reason by its name, without UNSPECIFIED."""

_NAMES = {reason: name for name, reason in FINISH_REASONS.items()}


def finish_reason_name(reason: FinishReason) -> str:
    """Return the name of a reason. ValueError for UNSPECIFIED and for values that the enum does not have."""
    name = _NAMES.get(reason)
    if name is None:
        raise ValueError(f"finish reason {reason} has no name: expected one of {', '.join(FINISH_REASONS)}")
    return name


def parse_finish_reason(name: str) -> FinishReason:
    """Return the reason of a name; UNSPECIFIED for "". ValueError for a name that no reason has."""
    if not name:
        return FinishReason.FINISH_REASON_UNSPECIFIED
    reason = FINISH_REASONS.get(name)
    if reason is None:
        raise ValueError(f"unknown finish reason {name!r}: expected one of {', '.join(FINISH_REASONS)}")
    return reason
