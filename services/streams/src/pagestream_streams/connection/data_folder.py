"""Which servers read a data folder: the one that wrote its files, and newer ones."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

SERVER_FILE = "server.json"
"""File in a data folder that names the server that wrote the others."""
REDIS, VALKEY = "redis", "valkey"

_PARTS, _PARTS_SINCE = "appendonlydir", (7, 0, 0)
"""Folder of the append-only files since Redis 7.0. An older server doesn't see it, and starts empty beside it."""
_SINGLE = "appendonly.aof"
_LAST_COMMON = (7, 2)
"""Valkey began as Redis 7.2, and reads what Redis wrote up to then."""
_HEAD = re.compile(
    rb"(?P<format>[A-Z]{5,6}\d{3,4})(?:\xfa.(?P<name>redis|valkey)-ver.(?P<version>\d+\.\d+\.\d+))?", re.S
)
"""Begin of a snapshot: its format, then the version of the server that wrote it."""
_HEAD_BYTES = 64
_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Version(NamedTuple):
    """A server's name and version; as text `valkey 9.1.2`."""

    name: str
    numbers: tuple[int, int, int]

    @property
    def number(self) -> str:
        """The version alone, as text."""
        return ".".join(map(str, self.numbers))

    def __str__(self) -> str:
        return f"{self.name} {self.number}"

    def reads(self, writer: Version) -> bool:
        """Whether this server reads the files that `writer` wrote."""
        if self.name == writer.name:
            return self.numbers >= writer.numbers
        is_before_fork = writer.name == REDIS and writer.numbers[:2] <= _LAST_COMMON
        return self.name == VALKEY and is_before_fork


class FolderContent(NamedTuple):
    """What a data folder says of the servers that have written to it."""

    recorded: Version | None
    """Of the record; None where there is none, as in folders that were written before there were records."""
    seen: Version | None
    """Of the files: who wrote the snapshot, or the oldest server that knows the layout; None where all read them."""
    format: str
    """Format of the files, such as `appendonlydir VALKEY080`; empty in an empty folder."""
    ignored: Path | None = None
    """Append-only file that no server reads: an older one has written it beside the files of a newer one."""

    @property
    def writer(self) -> Version | None:
        """The newest server that is known to have written here."""
        return self.recorded if self.seen is None or (self.recorded and self.recorded.reads(self.seen)) else self.seen

    def is_read_by(self, server: Version) -> bool:
        """Whether a server reads all that lies here."""
        return all(server.reads(writer) for writer in (self.recorded, self.seen) if writer is not None)


def content_of(folder: Path) -> FolderContent:
    """Read what a data folder says of its servers. Files that can't be read say nothing."""
    single = folder / _SINGLE
    manifest = folder / _PARTS / f"{_SINGLE}.manifest"
    recorded = _recorded(folder)
    if not manifest.is_file():
        found, seen = _head(single)
        layout = _SINGLE if single.is_file() else ""
        return FolderContent(recorded, seen, f"{layout} {found}".strip())
    named = {line.split()[1] for line in _text(manifest).splitlines() if line.startswith("file ")}
    bases = sorted(file for file in manifest.parent.glob("*.base.*") if file.name in named)
    found, seen = _head(bases[-1]) if bases else ("", None)
    if seen is None or seen.numbers < _PARTS_SINCE:  # of a single file that a newer server has moved there
        seen = Version(REDIS, _PARTS_SINCE)
    ignored = single if single.is_file() and _SINGLE not in named else None
    return FolderContent(recorded, seen, f"{_PARTS} {found}".strip(), ignored)


def record_server(folder: Path, info: Mapping[str, Any]) -> None:
    """Record the server that runs on a folder's files, from its INFO; none of a version that isn't numbers.

    Raises OSError.
    """
    name = VALKEY if "valkey_version" in info else REDIS
    try:
        server = Version(name, _numbers(str(info[f"{name}_version"])))
    except ValueError:
        return
    now = content_of(folder)
    if now.recorded == server:
        return
    content = {"name": name, "version": server.number, "format": now.format}
    path = folder / SERVER_FILE
    written = path.with_name(f"{SERVER_FILE}.new")
    descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)


def _recorded(folder: Path) -> Version | None:
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((folder / SERVER_FILE).read_text())
        return Version(str(content["name"]), _numbers(str(content["version"])))
    return None


def _numbers(text: str) -> tuple[int, int, int]:
    match = _NUMBERS.match(text)
    if match is None:
        raise ValueError(f"{text[:40]!r} was given, a version such as 9.1.2 is expected")
    return int(match[1]), int(match[2]), int(match[3])


def _head(file: Path) -> tuple[str, Version | None]:
    """Return the format of a snapshot at the begin of a file, and who wrote it; "" and None where there is none."""
    with suppress(OSError), file.open("rb") as opened:
        if match := _HEAD.match(opened.read(_HEAD_BYTES)):
            version = match["version"]
            writer = Version(match["name"].decode(), _numbers(version.decode())) if version else None
            return match["format"].decode(), writer
    return "", None


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(errors="replace")
    return ""
