"""A Redis server whose syncs are recorded, so that the death of its machine can be simulated.

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
    """Compile the library to preload; skip the test where there is no C compiler."""
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
    """A server whose process or machine can die; with the machine, its files end where they were last synced."""

    @classmethod
    def of(cls, binary: ServerBinary, library: Path, folder: Path, appendfsync: str) -> "WatchedServer":
        """Create it stopped."""
        # Paths in the record are without symbolic links.
        folder = folder.resolve()
        plain = server(binary, folder, "--appendfsync", appendfsync)
        return cls(folder, ["env", f"LD_PRELOAD={library}", f"SYNCED_FILES={folder}", *plain.command], plain.port)

    @property
    def url(self) -> str:
        """Address for Broker.connect."""
        return f"redis://{HOST}:{self.port}/0"

    def start_and_wait(self) -> None:
        """Start it and wait until it has loaded its files."""
        self.start()
        until(self.answers, "the watched server", [self])

    # -- the disk

    def be_late(self) -> None:
        """From now on syncs return at once without syncing: as if the next sync were still to come."""
        (self.folder / "late").touch()

    def get_stuck(self) -> None:
        """From now on syncs block."""
        (self.folder / "stuck").touch()

    def recover(self) -> None:
        """From now on syncs work."""
        for word in ("late", "stuck"):
            (self.folder / word).unlink(missing_ok=True)

    def met(self, word: str) -> int:
        """Return the number of syncs in a state of the disk so far: "sync", "late" or "stuck"."""
        return sum(kind == word for kind, _, _ in self._record())

    def synced(self) -> dict[Path, int]:
        """Return the size at its last sync of each file that was ever synced."""
        sizes: dict[Path, int] = {}
        for kind, first, second in self._record():
            if kind == "sync":
                sizes[Path(second)] = int(first)
            elif kind == "rename" and Path(first) in sizes:
                sizes[Path(second)] = sizes.pop(Path(first))
        return sizes

    def num_written(self) -> int:
        """Return the size of the growing append-only file in bytes."""
        return growing_file(self.folder).stat().st_size

    def num_synced(self) -> int:
        """Return how many of those bytes were synced."""
        return self.synced().get(growing_file(self.folder), 0)

    def has_written(self) -> bool:
        """Return whether all acknowledged writes are in the file, synced or not."""
        info = self._persistence()
        return not int(info["aof_buffer_length"]) and not int(info["aof_pending_bio_fsync"])

    # -- deaths

    def lose_process(self) -> None:
        """Kill the process; all that it has written is there at the next start."""
        self.kill()
        self.recover()
        self.start_and_wait()

    def lose_machine(self) -> None:
        """Kill the machine: the files end where they were last synced; one that never was is empty."""
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
    """Return whether its syncs are recorded: a statically linked binary does not call the library's."""
    one = WatchedServer.of(binary, library, folder, "always")
    try:
        one.start_and_wait()
        one.ask("SET", "key", "value")
        return growing_file(one.folder) in one.synced()
    finally:
        one.kill()
