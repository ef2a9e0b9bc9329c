"""A Redis server on a disk that is watched: it is known which bytes have been synced, so its machine can die.

`synced_files.c` is preloaded into the server. What this doesn't model: the machine keeps the names of files as the
server gave them, and what the disk has of a file is its beginning.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pagestream_streams.connection.embedded import ServerBinary
from support.redis.lost_writes import growing_file
from support.redis.servers import skip_for_want_of
from support.redis.topologies import HOST, Server, server, until

_SOURCE = Path(__file__).with_suffix(".c")
_BUILD_LIMIT_S = 60.0


def built_watch(folder: Path) -> Path:
    """The library that is preloaded; skips where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        skip_for_want_of("cc", "no C compiler (cc) is on the PATH: what a server syncs can't be watched")
        raise AssertionError
    library = folder / "synced_files.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, _SOURCE], check=True, timeout=_BUILD_LIMIT_S
    )
    return library


@dataclass
class WatchedServer(Server):
    """A server whose process can die, or its machine: then its files end where they were synced last."""

    @classmethod
    def of(cls, binary: ServerBinary, library: Path, folder: Path, appendfsync: str) -> "WatchedServer":
        """Starts nothing yet."""
        # Paths in the record are without symbolic links.
        folder = folder.resolve()
        plain = server(binary, folder, "--appendfsync", appendfsync)
        return cls(folder, ["env", f"LD_PRELOAD={library}", f"SYNCED_FILES={folder}", *plain.command], plain.port)

    @property
    def url(self) -> str:
        """For Broker.connect."""
        return f"redis://{HOST}:{self.port}/0"

    def start_and_wait(self) -> None:
        """Until it has loaded its files."""
        self.start()
        until(self.answers, "the watched server", [self])

    # -- the disk

    def be_late(self) -> None:
        """From now on a sync says that it is done, and is not: the time between two syncs is as long as one likes."""
        (self.folder / "late").touch()

    def get_stuck(self) -> None:
        """From now on no sync ends."""
        (self.folder / "stuck").touch()

    def recover(self) -> None:
        """The disk is as disks are."""
        for word in ("late", "stuck"):
            (self.folder / word).unlink(missing_ok=True)

    def met(self, word: str) -> int:
        """How many syncs met the disk in this state so far: "sync", "late" or "stuck"."""
        return sum(kind == word for kind, _, _ in self._record())

    def synced(self) -> dict[Path, int]:
        """What the disk has: the size at its last sync, of each file that was ever synced."""
        sizes: dict[Path, int] = {}
        for kind, first, second in self._record():
            if kind == "sync":
                sizes[Path(second)] = int(first)
            elif kind == "rename" and Path(first) in sizes:
                sizes[Path(second)] = sizes.pop(Path(first))
        return sizes

    def num_written(self) -> int:
        """Bytes of the append-only file that grows."""
        return growing_file(self.folder).stat().st_size

    def num_synced(self) -> int:
        """Bytes of it that the disk has."""
        return self.synced().get(growing_file(self.folder), 0)

    def has_written(self) -> bool:
        """Whether everything that was answered is in the file, on the disk or not."""
        info = self._persistence()
        return not int(info["aof_buffer_length"]) and not int(info["aof_pending_bio_fsync"])

    # -- deaths

    def lose_process(self) -> None:
        """SIGKILL; whatever the process has written is there when it starts again."""
        self.kill()
        self.recover()
        self.start_and_wait()

    def lose_machine(self) -> None:
        """The same, and the files end where they were synced last; one that never was is empty."""
        self.kill()
        self.recover()
        sizes = self.synced()
        for path in (*self.folder.glob("appendonly.aof*"), *self.folder.glob("appendonlydir/*")):
            with path.open("rb+") as file:
                file.truncate(min(path.stat().st_size, sizes.get(path, 0)))
        self.start_and_wait()

    def _record(self) -> list[tuple[str, str, str]]:
        try:
            lines = (self.folder / "synced").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [(kind, first, second) for kind, first, second in (line.split("\t") for line in lines)]

    def _persistence(self) -> dict[str, str]:
        answer = self.ask("INFO", "persistence")
        assert isinstance(answer, dict)
        return {str(name): str(value) for name, value in answer.items()}


def is_watched(binary: ServerBinary, library: Path, folder: Path) -> bool:
    """Whether its syncs are seen: a binary that is linked statically calls none of the library's."""
    one = WatchedServer.of(binary, library, folder, "always")
    try:
        one.start_and_wait()
        one.ask("SET", "key", "value")
        return growing_file(one.folder) in one.synced()
    finally:
        one.kill()
