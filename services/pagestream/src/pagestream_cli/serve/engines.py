"""What serve knows of its engines: which of them claim requests, and which an earlier serve left behind."""

from __future__ import annotations

import json

from pagestream_cli.datadir import DataDir
from pagestream_cli.errors import ServeFileInvalidError
from pagestream_cli.serve.plan import engine_name
from pagestream_cli.servefile import read_record

READY = "ready"
"""Message of the log record that an engine writes when it begins to claim; the record has its `engine_id`."""


class EngineLogs:
    """Read from the engines' logs which of them claim requests, and under which id (name and boot nonce)."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def read(self, part: str, line: str) -> None:
        """Read a line of a part's log."""
        if READY not in line or not line.startswith("{"):
            return
        try:
            record = json.loads(line)
        except ValueError:
            return
        if record.get("message") == READY and "engine_id" in record:
            self._ids[part] = str(record["engine_id"])

    def claims(self, part: str) -> bool:
        """Whether the engine of this part claims requests."""
        return part in self._ids

    def forget(self, part: str) -> str | None:
        """Return the id of an engine that died, and remove it; None where it never claimed."""
        return self._ids.pop(part, None)


def engines_left_behind(data_dir: DataDir) -> tuple[str, ...]:
    """Return the engines of a serve that was killed before it could remove its serve.json: they died with it."""
    try:
        record = read_record(data_dir.serve_file)
    except ServeFileInvalidError:
        return ()
    pids = {process.name: process.pid for process in record.processes} if record else {}
    serve = pids.get("serve")
    return () if serve is None else tuple(engine_name(name, serve) for name in pids if name.startswith("engine-"))
