"""What a part writes, as one readable line for a terminal."""

from __future__ import annotations

import json
from dataclasses import dataclass

WARNING_WORDS = ("warning", "error", "critical", "fatal", "traceback")
LEVELS = {"debug": 10, "info": 20, "warn": 30, "warning": 30, "error": 40, "critical": 50, "fatal": 50}
WARNING = 30
MAX_CHARS = 400


@dataclass(frozen=True)
class ShortLine:
    """One line in its short form."""

    level: int
    """As the logging module numbers them."""
    text: str


def shorten(line: str) -> ShortLine:
    """A JSON log record, or a line of any other form; the level of the latter is guessed from its words, and from
    Redis' `#` mark.
    """
    record = _record(line)
    if record is None:
        return ShortLine(_guess(line), _cut(line))
    level = LEVELS.get(str(record.get("level", record.get("levelname", "info"))).lower(), 20)
    message = next((str(record[key]) for key in ("message", "msg", "event") if key in record), line)
    error = next((str(record[key]) for key in ("exception", "exc_info", "error") if record.get(key)), "")
    last_line = error.strip().splitlines()[-1] if error.strip() else ""
    return ShortLine(level, _cut(f"{message}: {last_line}" if last_line else message))


def _record(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _guess(line: str) -> int:
    lowered = line.lower()
    if any(word in lowered for word in WARNING_WORDS) or " # " in line[:60]:
        return WARNING
    return LEVELS["info"]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"
