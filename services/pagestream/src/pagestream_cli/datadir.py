"""The data folder of a deployment on this machine: its queue, its logs and the list of its processes."""

from __future__ import annotations

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from pagestream_cli.errors import DataDirBusyError, DataDirError

LEAST_FREE_BYTES = 256 << 20
"""For Redis' files, their rewrite, and the logs."""


def default_data_dir() -> Path:
    """Return `$XDG_DATA_HOME/pagestream`, or `~/.local/share/pagestream`."""
    base = os.environ.get("XDG_DATA_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share"
    return root / "pagestream"


@dataclass(frozen=True)
class DataDir:
    """Paths in a data folder."""

    path: Path

    @classmethod
    def at(cls, path: str | Path | None) -> DataDir:
        """Return the given folder, else the default one. Nothing is created."""
        return cls(default_data_dir() if path is None else Path(path).expanduser().absolute())

    @property
    def serve_file(self) -> Path:
        return self.path / "serve.json"

    @property
    def loaded_file(self) -> Path:
        """Exists once an engine has loaded the model: gateways open no port before."""
        return self.path / "loaded"

    @property
    def lock_file(self) -> Path:
        return self.path / "serve.lock"

    @property
    def redis(self) -> Path:
        return self.path / "redis"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def create(self) -> None:
        """Create the folder and its subfolders, readable by their owner alone: they hold prompts and answers.

        Raises:
            DataDirError: a folder cannot be created.
        """
        try:
            for folder in (self.path, self.redis, self.logs):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise DataDirError(
                f"cannot create the data folder {self.path}: {error.strerror}",
                hint="choose another with --data-dir DIR",
            ) from error

    def require_space(self) -> None:
        """Check that the folder's disk has room for Redis' files and the logs.

        Raises:
            DataDirError: it has less than LEAST_FREE_BYTES.
        """
        free = shutil.disk_usage(self.path).free
        if free < LEAST_FREE_BYTES:
            raise DataDirError(
                f"{free >> 20} MB are free at {self.path}, {LEAST_FREE_BYTES >> 20} MB are needed: Redis stops where "
                "its disk is full",
                hint="make room, or choose another folder with --data-dir DIR",
            )


class DataDirLock:
    """Lock a data folder for one process. The kernel releases the lock when the process ends, in whatever way."""

    def __init__(self, data_dir: DataDir) -> None:
        self._data_dir = data_dir
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        file = self._data_dir.lock_file.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            raise DataDirBusyError(
                f"another pagestream serve (process {holder}) uses {self._data_dir.path}",
                hint="stop it, or give this one its own folder with --data-dir DIR and its own ports",
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
