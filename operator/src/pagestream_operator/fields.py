"""Read fields of objects as the API server shows them: what is absent, null or of another type reads as nothing."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any


def mapping(value: object) -> Mapping[str, Any]:
    """The value where it is an object, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: object) -> list[Mapping[str, Any]]:
    """The objects of a list; none where it is no list."""
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def nested(value: object, *path: str) -> Any:
    """The field at a path of names; None where there is none."""
    for name in path:
        value = mapping(value).get(name)
    return value


def text(value: object) -> str:
    """The value where it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def whole(value: object, default: int = 0) -> int:
    """The value where it is a whole number of 0 or more, else `default`."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


def seconds(value: object) -> float | None:
    """A time of the API in Unix seconds; None where it is none."""
    try:
        return datetime.fromisoformat(text(value)).timestamp()
    except (ValueError, OverflowError):
        return None


def conditions(status: object) -> dict[str, Mapping[str, Any]]:
    """The conditions of a status, by type."""
    return {text(each.get("type")): each for each in mappings(mapping(status).get("conditions"))}


def job_ending(job: Mapping[str, Any]) -> str | None:
    """Why a Job failed; "" where it is complete, None while it runs."""
    for kind, condition in conditions(job.get("status")).items():
        if condition.get("status") == "True" and kind == "Complete":
            return ""
        if condition.get("status") == "True" and kind == "Failed":
            return text(condition.get("message")) or text(condition.get("reason")) or "its Job has failed"
    return None


def is_owned_by(body: Mapping[str, Any], uid: str) -> bool:
    """Whether an object names an owner with this uid."""
    return any(owner.get("uid") == uid for owner in mappings(nested(body, "metadata", "ownerReferences")))
