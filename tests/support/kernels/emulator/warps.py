"""Warps that step together: the same warp of several programs, each lane with its own place in the code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from support.kernels.emulator.faults import Fault
from support.kernels.emulator.formats import UNSIGNED, Array
from support.kernels.emulator.memory import GlobalMemory, SharedMemory

WARP = 32
"""Lanes of a warp."""

Mask: TypeAlias = Array | None
"""The lanes that take part; None: all."""
Grid: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction, ready to run."""

    text: str
    run: Callable[[Warps, Mask], None]
    predicate: Callable[[Warps], Array] | None


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions that run one after the other, and what ends them."""

    steps: tuple[Step, ...]
    end: str
    """`bra`, `bar`, `ret`, or empty where the next block begins at a label."""
    predicate: Callable[[Warps], Array] | None
    """Of the end."""
    target: int
    """Of a branch."""
    next: int


class Warps:
    """The state of one warp of each of several programs.

    Args:
        number: of the warp, within its program.
        programs: coordinates of the programs.
        widths: of the registers, by name.
    """

    def __init__(
        self,
        number: int,
        programs: Sequence[Grid],
        grid: Grid,
        *,
        width: Callable[[str], int],
        parameters: Mapping[str, Array],
        global_memory: GlobalMemory,
        shared_memory: SharedMemory,
    ) -> None:
        self.number = number
        self.num_lanes = WARP * len(programs)
        self.parameters = parameters
        self.global_memory = global_memory
        self.shared_memory = shared_memory
        self.program_of_lane = np.arange(len(programs)).repeat(WARP)
        lane = np.arange(self.num_lanes, dtype=np.uint32) % np.uint32(WARP)
        self.special = {"%laneid": lane, "%tid.x": lane + np.uint32(WARP * number)}
        for axis, name in enumerate("xyz"):
            places = np.array([program[axis] for program in programs], np.uint32)
            self.special[f"%ctaid.{name}"] = places.repeat(WARP)
            self.special[f"%nctaid.{name}"] = np.array([grid[axis]], np.uint32)
        self._width = width
        self._registers: dict[str, Array] = {}
        self._place = np.zeros(self.num_lanes, np.int64)
        self._is_live = np.ones(self.num_lanes, np.bool_)
        self._waits = np.zeros(self.num_lanes, np.bool_)
        self._groups = np.zeros(self.num_lanes, np.int64)
        """The commit group of each lane's next copy."""

    # -- registers --

    def read(self, register: str) -> Array:
        """Return a register of all lanes, or one value where all have the same; poison where it wasn't written."""
        value = self._registers.get(register)
        return _poison(self._width(register)) if value is None else value

    def write(self, register: str, value: Array, mask: Mask) -> None:
        """Set a register of the lanes that take part."""
        self._registers[register] = value if mask is None else np.where(mask, value, self.read(register))

    def wide(self, value: Array) -> Array:
        """The value of each lane."""
        return value if len(value) == self.num_lanes else np.broadcast_to(value, (self.num_lanes,))

    def lanes(self, mask: Mask) -> Array:
        """The numbers of the lanes that take part."""
        return np.arange(self.num_lanes) if mask is None else np.flatnonzero(mask)

    def full_warps(self, mask: Mask) -> Array:
        """The programs whose warps take part, which have to do so with all lanes.

        Raises:
            Fault: one takes part with some of them.
        """
        if mask is None:
            return np.arange(self.num_lanes // WARP)
        by_warp = mask.reshape(-1, WARP)
        some = by_warp.any(axis=1)
        if (some != by_warp.all(axis=1)).any():
            raise Fault("an instruction for whole warps, with some of the lanes")
        return np.flatnonzero(some)

    # -- asynchronous copies --

    def copy(self, lanes: Array, addresses: Array, data: Array) -> None:
        """Begin copies of some lanes to shared memory."""
        groups, programs = self._groups[lanes], self.program_of_lane[lanes]
        self.shared_memory.begin_copy(self.number, programs, addresses, data, lanes=lanes, groups=groups)

    def commit_copies(self, mask: Mask) -> None:
        """End the group of the copies begun so far."""
        self._groups[self.lanes(mask)] += 1

    def wait_for_copies(self, mask: Mask, left: int) -> None:
        """Wait until at most `left` of the last groups are on their way; -1: for all copies, committed or not."""
        last = self._groups - left - 1
        if mask is not None:
            last = np.where(mask, last, -1)
        self.shared_memory.finish_copies(self.number, last)

    # -- control --

    @property
    def has_ended(self) -> bool:
        """Whether no lane has anything left to do."""
        return not self._is_live.any()

    def places(self) -> Array:
        """(programs,): where each program's warp waits; -1 where it has ended."""
        places: Array = np.where(self._is_live, self._place, -1).reshape(-1, WARP).max(axis=1)
        return places

    def leave_barrier(self) -> None:
        """Go on behind the barrier."""
        self._waits[:] = False

    def run(self, blocks: Mapping[int, Block]) -> None:
        """Run until each program's warp has reached a barrier or its end.

        Lanes that parted meet again since those that are behind go first.
        """
        while True:
            ready = self._is_live & ~self._waits
            if not ready.any():
                return
            place = int(self._place[ready].min())
            active = ready & (self._place == place)
            block = blocks[place]
            self._run_steps(block, None if active.all() else active)
            self._end_block(block, active)

    def _run_steps(self, block: Block, mask: Mask) -> None:
        for step in block.steps:
            own = mask
            if step.predicate is not None:
                own = self._chosen(step.predicate, mask)
                if own is not None and not own.any():
                    continue
            try:
                step.run(self, own)
            except Fault as fault:
                raise Fault(f"{step.text}: {fault}") from None

    def _chosen(self, predicate: Callable[[Warps], Array], mask: Mask) -> Mask:
        chosen = self.wide(predicate(self))
        if mask is not None:
            chosen = chosen & mask
        return None if chosen.all() else chosen

    def _end_block(self, block: Block, active: Array) -> None:
        chosen = active
        if block.predicate is not None:
            chosen = active & block.predicate(self)
        if block.end == "bar":
            parted = active.reshape(-1, WARP) != (self._is_live.reshape(-1, WARP))
            if (parted & active.reshape(-1, WARP).any(axis=1, keepdims=True)).any():
                raise Fault("a barrier that some lanes of a warp don't reach")
            self._waits |= active
        self._place[active] = block.next
        if block.end == "bra":
            self._place[chosen] = block.target
        elif block.end == "ret":
            self._is_live &= ~chosen


def _poison(width: int) -> Array:
    """All bits set: a NaN, and an address of nothing."""
    return np.ones(1, np.bool_) if width == 1 else np.full(1, (1 << width) - 1, UNSIGNED[width])
