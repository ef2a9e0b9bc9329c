"""What engines say about themselves in their logs."""

from __future__ import annotations

import json

from pagestream_cli.datadir import DataDir
from pagestream_cli.errors import ServeFileInvalidError
from pagestream_cli.serve.plan import engine_name
from pagestream_cli.servefile import read_record

READY = "ready"
"""The message of the log record that an engine writes once it claims; it carries `engine_id`."""


class EngineNews:
    """Which engines claim, and under which id: their name and the boot nonce of this life."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def hear(self, part: str, line: str) -> None:
        """Take a line of an engine's log."""
        if READY not in line or not line.startswith("{"):
            return
        try:
            record = json.loads(line)
        except ValueError:
            return
        if record.get("message") == READY and "engine_id" in record:
            self._ids[part] = str(record["engine_id"])

    def claims(self, part: str) -> bool:
        """Whether this engine takes requests."""
        return part in self._ids

    def forget(self, part: str) -> str | None:
        """The engine died: the id under which it is dead; None when it never claimed."""
        return self._ids.pop(part, None)


def engines_left_behind(data_dir: DataDir) -> tuple[str, ...]:
    """Engines of a serve that was killed before it could take its serve.json away: they died with it."""
    try:
        record = read_record(data_dir.serve_file)
    except ServeFileInvalidError:
        return ()
    pids = {process.name: process.pid for process in record.processes} if record else {}
    serve = pids.get("serve")
    return () if serve is None else tuple(engine_name(name, serve) for name in pids if name.startswith("engine-"))
