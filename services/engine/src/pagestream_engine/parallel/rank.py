"""Which of a group's ranks a process is, which layers are its own, and how far each rank has got, without torch."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class OwnRank:
    """Which rank a process is in a group. Its executor sets it; no option does."""

    index: int = 0
    """From 0: `torch.distributed`'s rank."""
    size: int = 1
    """Ranks of the group."""
    folder: Path | None = None
    """Where the ranks of this machine find each other; None for a rank alone."""
    num_stages: int = 1
    """Of layers. Ranks that follow each other are of one stage, and divide each of its layers."""
    first_local: int = 0
    """The first rank of this machine."""
    num_on_machine: int | None = None
    """Ranks of this machine; None: all."""
    store: str | None = None
    """Where ranks of several machines find each other: `tcp://<host>:<port>`, which rank 0 listens on."""
    interface: str | None = None
    """Network interface of this machine that the others reach; None: the one of its host name."""

    @property
    def tensor_size(self) -> int:
        """Ranks of a stage."""
        return self.size // self.num_stages

    @property
    def tensor_rank(self) -> int:
        """Among those of the stage, from 0."""
        return self.index % self.tensor_size

    @property
    def stage(self) -> int:
        """From 0."""
        return self.index // self.tensor_size

    @property
    def num_local(self) -> int:
        """Ranks that share this machine's memory, processors and devices."""
        return self.size if self.num_on_machine is None else self.num_on_machine

    @property
    def local_rank(self) -> int:
        """Its number among them, from 0."""
        return self.index - self.first_local


def layers_of_stage(num_layers: int, stage: int, num_stages: int) -> range:
    """Return a stage's layers: equal numbers, and one more in the first ones where that does not come out even; the
    last one has the head, too."""
    first, end = (-(-num_layers * number // num_stages) for number in (stage, stage + 1))
    return range(first, end)


class Progress:
    """How far each rank is, in a file that all ranks of a machine and their parent map.

    A rank's count is twice the collectives and layers that it has done, and odd while it is in a collective: there it
    computes nothing, and waits for the others. Each rank writes its own count, from one thread (`parallel.progress`);
    the parent those of other machines.
    """

    def __init__(self, folder: Path, size: int, *, create: bool = False) -> None:
        """Map the file of a group's folder; with `create` make it first, all counts 0."""
        path = folder / "progress"
        if create:
            path.write_bytes(bytes(size * _COUNT_BYTES))
        with path.open("r+b") as file:
            self._counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")

    def advance(self, rank: int) -> None:
        """Count one more layer of a stage's rank."""
        self._counts[rank] = self._ended(rank) + 2

    @contextmanager
    def collective(self, rank: int) -> Iterator[None]:
        """Count the block as a collective that a rank takes part in; one that fails stays begun until the next."""
        self.begin(rank)
        yield
        self.end(rank)

    def begin(self, rank: int) -> None:
        """Count that a rank has entered a collective."""
        self._counts[rank] = self._ended(rank) + 1

    def end(self, rank: int) -> None:
        """Count that a collective, which was begun, has ended for a rank."""
        self._counts[rank] += 1

    def _ended(self, rank: int) -> int:
        return self._counts[rank] + self._counts[rank] % 2

    def note(self, rank: int, count: int) -> None:
        """Note the count of a rank of another machine."""
        self._counts[rank] = count

    def count(self, rank: int) -> int:
        """Return the count of a rank."""
        return self._counts[rank]

    def counts(self) -> list[int]:
        """Return the count of each rank."""
        return self._counts.tolist()
