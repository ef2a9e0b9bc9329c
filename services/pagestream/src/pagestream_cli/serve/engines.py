"""What serve knows of its engines: which claim requests or stand by, and which an earlier serve left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from pagestream_cli.datadir import DataDir
from pagestream_cli.errors import ServeFileInvalidError
from pagestream_cli.servefile import read_record

READY = "ready"
"""Message of the log record that an engine writes when it begins to claim; the record has its `engine_id`."""
COMPUTES = "the model computes on"
"""Begin of the message of the record that says where, and in which dtype; the record has both."""
STANDING_BY = "standing by"
"""Likewise, of an engine that waits to be asked to join."""


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says of its model at the start; empty and 0 where it hasn't."""

    device: str = ""
    dtype: str = ""
    max_model_len: int = 0
    """Tokens."""


class EngineLogs:
    """Read from the engines' logs which of them claim requests, and under which id (name and boot nonce)."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._standing_by: set[str] = set()
        self.facts = EngineFacts()
        """Of the first engine that said so."""

    def read(self, part: str, line: str) -> None:
        """Read a line of a part's log."""
        if not (READY in line or STANDING_BY in line or COMPUTES in line) or not line.startswith("{"):
            return
        try:
            record = json.loads(line)
        except ValueError:
            return
        if record.get("message") == READY and "engine_id" in record:
            self._ids[part] = str(record["engine_id"])
            self.facts = replace(self.facts, max_model_len=int(record.get("max_model_len", 0)))
        elif "device" in record and str(record.get("message")).startswith(COMPUTES):
            self.facts = replace(self.facts, device=str(record["device"]), dtype=str(record.get("dtype", "")))
        elif record.get("message") == STANDING_BY:
            self._standing_by.add(part)

    def claims(self, part: str) -> bool:
        """Whether the engine of this part claims requests."""
        return part in self._ids

    def stands_by(self, part: str) -> bool:
        """Whether the engine of this part has waited to be asked to join, since its start."""
        return part in self._standing_by

    def forget(self, part: str) -> str | None:
        """Return the id of an engine that died, and remove it; None where it never claimed."""
        self._standing_by.discard(part)
        return self._ids.pop(part, None)


def engine_name(part: str, serve_pid: int) -> str:
    """Return the name of an engine in Redis, which several serves may share."""
    return f"{part}-{serve_pid}"


def engines_left_behind(data_dir: DataDir) -> tuple[str, ...]:
    """Return the engines of a serve that was killed before it could remove its serve.json: they died with it."""
    try:
        record = read_record(data_dir.serve_file)
    except ServeFileInvalidError:
        return ()
    pids = {process.name: process.pid for process in record.processes} if record else {}
    serve = pids.get("serve")
    return () if serve is None else tuple(engine_name(name, serve) for name in pids if name.startswith("engine-"))
