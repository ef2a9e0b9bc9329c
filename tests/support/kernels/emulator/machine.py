"""Runs a launch of one kernel's PTX, warps and programs in random order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product

import numpy as np
from support.kernels.emulator import arithmetic, conversions, data_movement, tensor_cores
from support.kernels.emulator.faults import Fault
from support.kernels.emulator.memory import GlobalMemory, SharedMemory
from support.kernels.emulator.operands import Build, Operands, bits_of_type
from support.kernels.emulator.ptx import Instruction, Program, parse
from support.kernels.emulator.warps import Block, Grid, Step, Warps

MOST_PROGRAMS = 64
"""That step together; more make arrays that no cache holds."""
MOST_SHARED_BYTES = 1 << 21
"""Of the programs that step together."""

_BUILDERS: Mapping[str, Build] = {
    **arithmetic.BUILDERS,
    **conversions.BUILDERS,
    **data_movement.BUILDERS,
    **tensor_cores.BUILDERS,
}
_ENDS = {"bra": "bra", "bar": "bar", "barrier": "bar", "ret": "ret", "exit": "ret"}


class Kernel:
    """The PTX of one kernel, ready to run.

    Raises:
        Fault: it has an instruction that isn't emulated.
    """

    def __init__(self, ptx: str) -> None:
        self.program = parse(ptx)
        self.granule = _narrowest_access(self.program.instructions)
        operands = Operands(self.program)
        ends = [_ENDS.get(each.opcode, "") for each in self.program.instructions]
        ends = [
            "" if "warp" in each.modifiers else end for each, end in zip(self.program.instructions, ends, strict=True)
        ]
        steps = [
            None if end else _step(instruction, operands)
            for instruction, end in zip(self.program.instructions, ends, strict=True)
        ]
        self.blocks = _blocks(self.program, ends, steps, operands)

    def launch(
        self,
        arguments: Sequence[int],
        grid: Grid,
        *,
        num_warps: int,
        shared_bytes: int,
        memory: GlobalMemory,
        order: random.Random,
    ) -> None:
        """Run all programs of a grid.

        Args:
            arguments: one a parameter; floats as their bits.

        Raises:
            Fault: the code did what it must not do.
        """
        names = self.program.parameters
        if len(arguments) != len(names):
            raise Fault(f"{self.program.name}: {len(arguments)} arguments were given for {len(names)} parameters")
        parameters = {
            name: np.array([value & (2**64 - 1)], np.uint64) for name, value in zip(names, arguments, strict=True)
        }
        programs = [(x, y, z) for z, y, x in product(*map(range, reversed(grid)))]
        order.shuffle(programs)
        together = max(1, min(MOST_PROGRAMS, MOST_SHARED_BYTES // max(shared_bytes, 1)))
        for first in range(0, len(programs), together):
            own = programs[first : first + together]
            shared = SharedMemory(len(own), shared_bytes, self.granule)
            common = {"width": self.program.width, "global_memory": memory, "shared_memory": shared}
            warps = [Warps(number, own, grid, parameters=parameters, **common) for number in range(num_warps)]
            self._run(warps, shared, order)

    def _run(self, warps: Sequence[Warps], shared: SharedMemory, order: random.Random) -> None:
        """Run the warps of some programs to their end."""
        try:
            with np.errstate(all="ignore"):
                while not all(each.has_ended for each in warps):
                    for each in order.sample(warps, len(warps)):
                        each.run(self.blocks)
                    self._pass_barrier(warps)
                    shared.pass_barrier()
            shared.check_end()
        except Fault as fault:
            raise Fault(f"{self.program.name}: {fault}") from None

    @staticmethod
    def _pass_barrier(warps: Sequence[Warps]) -> None:
        """Let warps go on that wait at the same barrier as the others of their program."""
        places = np.stack([each.places() for each in warps])
        if (places != places[0]).any():
            raise Fault("warps of a program wait at different barriers, or some have ended")
        for each in warps:
            each.leave_barrier()


@lru_cache(maxsize=256)
def kernel_of(ptx: str) -> Kernel:
    """Make a kernel ready once."""
    return Kernel(ptx)


def _step(instruction: Instruction, operands: Operands) -> Step:
    build = _BUILDERS.get(instruction.opcode)
    if instruction.opcode == "bar":  # of a warp, whose lanes step together
        build = data_movement.BUILDERS["fence"]
    if build is None:
        raise Fault(f"no emulation of {instruction.text}")
    predicate = operands.reader(instruction.predicate, 1) if instruction.predicate else None
    return Step(instruction.text, build(instruction, operands), predicate)


def _blocks(
    program: Program, ends: Sequence[str], steps: Sequence[Step | None], operands: Operands
) -> Mapping[int, Block]:
    """Cut at the targets of branches and behind ends; by the place of the first instruction."""
    branches = [each for each, end in zip(program.instructions, ends, strict=True) if end == "bra"]
    begins = {program.labels[each.operands[-1]] for each in branches}
    blocks: dict[int, Block] = {}
    begin = 0
    for index, end in enumerate(ends):
        if not end and index + 1 not in begins and index + 1 < len(ends):
            continue
        own = tuple(step for step in steps[begin : index + 1] if step is not None)
        instruction = program.instructions[index]
        predicate = operands.reader(instruction.predicate, 1) if end and instruction.predicate else None
        target = program.labels[instruction.operands[-1]] if end == "bra" else 0
        if end == "bar" and (predicate is not None or len(instruction.operands) > 1):
            raise Fault(f"no emulation of {instruction.text}")
        blocks[begin] = Block(own, end, predicate, target, index + 1)
        begin = index + 1
    return blocks


def _narrowest_access(instructions: Sequence[Instruction]) -> int:
    """Bytes of the narrowest access to shared memory, at most 4."""
    sizes = [
        bits_of_type(each.type) // 8
        for each in instructions
        if each.opcode in ("ld", "st") and "shared" in each.modifiers
    ]
    if any(each.opcode == "ldmatrix" for each in instructions):
        sizes.append(2)
    return min(4, *sizes, 4)
