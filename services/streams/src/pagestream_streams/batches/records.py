"""What Redis keeps of files and batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, EXPIRED, CANCELLED = "completed", "failed", "expired", "cancelled"
ENDED = frozenset((COMPLETED, FAILED, EXPIRED, CANCELLED))
"""The last statuses of a batch."""
OUTPUT, ERRORS = "output", "errors"
"""The two files that a batch writes."""
_AT = "at:"  # before the names of times


@dataclass(frozen=True)
class StoredFile:
    """A file that readers see."""

    file_id: str
    name: str
    purpose: str
    num_bytes: int
    created_s: int
    """Unix seconds, by Redis' clock."""
    expires_ms: int
    """Unix milliseconds, likewise."""


class Tokens(NamedTuple):
    """Tokens of jobs."""

    prompt: int = 0
    cached: int = 0
    """Of the prompts."""
    output: int = 0


class Job(NamedTuple):
    """A line of a batch's file that has been taken, and whose result is not written yet."""

    line: int
    """Its number, from 1."""
    offset: int
    """Bytes before it in the file."""
    num_bytes: int
    """Without the end of the line."""
    request_id: str = ""
    """Empty where it is not known whether a request was accepted for it."""


@dataclass(frozen=True)
class Batch:
    """A batch as Redis has it."""

    batch_id: str
    tag: str
    """Its tenant's, see protocol.keys.tenant_tag."""
    status: str
    about: str
    """What its gateways have given to keep with it."""
    input_file_id: str
    file_ids: Mapping[str, str]
    """By OUTPUT and ERRORS; while it runs, and after its end of those that have any line."""
    times_ms: Mapping[str, int]
    """Unix milliseconds: when it was `created` and came to each status, when it `expires`; of what has happened."""
    offset: int
    """Bytes of the input whose lines have been taken."""
    line: int
    """Lines that have been taken."""
    total: int
    """Jobs; 0 before they are counted."""
    completed: int
    failed: int
    tokens: Tokens
    problems: str
    """Why it has failed, as its gateway wrote it; "" where it has not."""
    waits_for: str
    """Why its jobs do not go on, a code; "" while they do."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more happens to it."""
        return self.status in ENDED


def batch_of(batch_id: str, tag: str, fields: Mapping[str, str]) -> Batch:
    """Return a batch from the fields of its hash."""

    def number(name: str) -> int:
        return int(fields.get(name) or 0)

    return Batch(
        batch_id=batch_id,
        tag=tag,
        status=fields["status"],
        about=fields["about"],
        input_file_id=fields["input"],
        file_ids={name: fields[name] for name in (OUTPUT, ERRORS) if name in fields},
        times_ms={name[len(_AT) :]: int(time) for name, time in fields.items() if name.startswith(_AT)},
        offset=number("offset"),
        line=number("line"),
        total=number("total"),
        completed=number("completed"),
        failed=number("failed"),
        tokens=Tokens(number("prompt_tokens"), number("cached_tokens"), number("output_tokens")),
        problems=fields.get("problems", ""),
        waits_for=fields.get("waits", ""),
    )
