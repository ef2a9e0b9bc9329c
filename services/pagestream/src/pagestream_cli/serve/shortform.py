"""Output lines of parts in a short form for the terminal."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

WARNING_WORDS = ("warning", "error", "critical", "fatal", "traceback")
REDIS_LINE = re.compile(r"\d+:[A-Z] \d+ \w{3} \d{4} [\d:.]+ ([.*#-]) (.*)")
"""Redis marks lines of its highest log level with #, including the one that says that it has started."""
REDIS_WORDS = ("error", "fatal", "can't", "cannot", "no space", "bug report", "too long")
LEVELS = {"debug": 10, "info": 20, "warn": 30, "warning": 30, "error": 40, "critical": 50, "fatal": 50}
WARNING = 30
MAX_CHARS = 400


@dataclass(frozen=True)
class ShortLine:
    """One line in its short form."""

    level: int
    """Level as the logging module numbers it."""
    text: str


def shorten(line: str) -> ShortLine:
    """Shorten a JSON log record, a line of Redis, or any other line, whose level is guessed from its words."""
    if record := _record(line):
        return _from_record(record, line)
    if match := REDIS_LINE.fullmatch(line):
        mark, text = match.groups()
        is_bad = mark == "#" and any(word in text.lower() for word in REDIS_WORDS)
        return ShortLine(WARNING if is_bad else LEVELS["info"], _cut(text))
    is_bad = any(word in line.lower() for word in WARNING_WORDS)
    return ShortLine(WARNING if is_bad else LEVELS["info"], _cut(line))


def _from_record(record: dict[str, object], line: str) -> ShortLine:
    level = LEVELS.get(str(record.get("level", record.get("levelname", "info"))).lower(), LEVELS["info"])
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


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"
