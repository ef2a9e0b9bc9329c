"""Instructions that move data: loads, stores, asynchronous copies, moves and shuffles between lanes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import numpy as np
from support.kernels.emulator.faults import Fault
from support.kernels.emulator.formats import UNSIGNED, Array
from support.kernels.emulator.operands import Build, Execute, Operands, bits_of_type, number, vector
from support.kernels.emulator.ptx import Instruction
from support.kernels.emulator.warps import WARP, Mask, Warps


def _load(instruction: Instruction, operands: Operands) -> Execute:
    target, source = instruction.operands
    bits = bits_of_type(instruction.type)
    if "param" in instruction.modifiers:
        write_parameter, name = operands.writer(target), operands.parameter(source)
        return lambda warps, mask: write_parameter(warps, warps.parameters[name].astype(UNSIGNED[bits]), mask)
    targets, read_addresses = vector(target), operands.addresses(source)
    writers, is_shared = [operands.writer(each) for each in targets], "shared" in instruction.modifiers

    def load(warps: Warps, mask: Mask) -> None:
        lanes = warps.lanes(mask)
        addresses = warps.wide(read_addresses(warps))[lanes]
        if is_shared:
            programs = warps.program_of_lane[lanes]
            rows = warps.shared_memory.load(warps.number, programs, addresses, bits, len(targets))
        else:
            rows = warps.global_memory.load(addresses, bits, len(targets))
        for index, write in enumerate(writers):
            write(warps, _at(lanes, rows[:, index], warps.num_lanes), mask)

    return load


def _store(instruction: Instruction, operands: Operands) -> Execute:
    target, source = instruction.operands
    bits = bits_of_type(instruction.type)
    readers, read_addresses = operands.readers(vector(source), bits), operands.addresses(target)
    is_shared = "shared" in instruction.modifiers

    def store(warps: Warps, mask: Mask) -> None:
        lanes = warps.lanes(mask)
        addresses = warps.wide(read_addresses(warps))[lanes]
        rows = np.stack([warps.wide(read(warps))[lanes] for read in readers], axis=1)
        if is_shared:
            warps.shared_memory.store(warps.number, warps.program_of_lane[lanes], addresses, rows)
        else:
            warps.global_memory.store(addresses, rows)

    return store


def _copy(instruction: Instruction, operands: Operands) -> Execute:
    if "commit_group" in instruction.modifiers:
        return lambda warps, mask: warps.commit_copies(mask)
    if "wait_group" in instruction.modifiers or "wait_all" in instruction.modifiers:
        left = number(instruction.operands[0]) if instruction.operands else -1
        return lambda warps, mask: warps.wait_for_copies(mask, left)
    read_targets, read_sources = (operands.addresses(each) for each in instruction.operands[:2])
    size = number(instruction.operands[2])
    read_size = operands.reader(instruction.operands[3], 32) if len(instruction.operands) > 3 else None
    bits = min(8 * size, 64)

    def copy(warps: Warps, mask: Mask) -> None:
        lanes = warps.lanes(mask)
        sources = warps.wide(read_sources(warps))[lanes]
        rows = np.zeros((len(lanes), 8 * size // bits), UNSIGNED[bits])
        sizes = np.full(len(lanes), size) if read_size is None else warps.wide(read_size(warps))[lanes]
        if ((sizes != 0) & (sizes != size)).any():
            raise Fault("a copy that fills up with zeros behind a part isn't emulated")
        if (sizes != 0).any():
            rows[sizes != 0] = warps.global_memory.load(sources[sizes != 0], bits, rows.shape[1])
        warps.copy(lanes, warps.wide(read_targets(warps))[lanes], rows)

    return copy


def _move(instruction: Instruction, operands: Operands) -> Execute:
    target, source = instruction.operands
    bits = bits_of_type(instruction.type)
    sources, targets = vector(source), vector(target)
    if len(sources) > 1:
        part = bits // len(sources)
        readers, write_whole, dtype = operands.readers(sources, part), operands.writer(target), UNSIGNED[bits]

        def pack(warps: Warps, mask: Mask) -> None:
            parts = [read(warps).astype(dtype) << dtype(part * index) for index, read in enumerate(readers)]
            write_whole(warps, reduce(np.bitwise_or, parts), mask)

        return pack
    read = operands.reader(source, bits)
    if len(targets) > 1:
        part = bits // len(targets)
        writers = [operands.writer(each) for each in targets]

        def unpack(warps: Warps, mask: Mask) -> None:
            whole = read(warps)
            for index, write in enumerate(writers):
                write(warps, (whole >> UNSIGNED[bits](part * index)).astype(UNSIGNED[part]), mask)

        return unpack
    write = operands.writer(target)
    return lambda warps, mask: write(warps, read(warps), mask)


def _shuffle(instruction: Instruction, operands: Operands) -> Execute:
    target, source, distance, clamp = instruction.operands[:4]
    write, found = operands.writer(target.split("|")[0]), target.split("|")[1:]
    read, read_distance = operands.reader(source, 32), operands.reader(distance, 32)
    mode, segment, limit = instruction.modifiers[1], (number(clamp) >> 8) & 31, number(clamp) & 31
    write_found = operands.writer(found[0]) if found else None

    def shuffle(warps: Warps, mask: Mask) -> None:
        warps.full_warps(mask)
        lane = np.arange(warps.num_lanes) % WARP
        offset = read_distance(warps).astype(np.int64)
        last = (lane & segment) | (limit & ~segment)
        other = {
            "bfly": lane ^ offset,
            "up": lane - offset,
            "down": lane + offset,
            "idx": (lane & segment) | (offset & ~segment & 31),
        }[mode]
        is_within = other >= last if mode == "up" else other <= last
        chosen = np.where(is_within, other, lane) + np.arange(warps.num_lanes) // WARP * WARP
        write(warps, warps.wide(read(warps))[chosen], mask)
        if write_found is not None:
            write_found(warps, is_within, mask)

    return shuffle


def _reduce(instruction: Instruction, operands: Operands) -> Execute:
    kind, name = instruction.type[0], instruction.modifiers[1]
    read, write = operands.reader(instruction.operands[1], 32, kind), operands.writer(instruction.operands[0])
    functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "or": np.bitwise_or, "and": np.bitwise_and}
    function = {**functions, "xor": np.bitwise_xor}[name]

    def reduce_warps(warps: Warps, mask: Mask) -> None:
        warps.full_warps(mask)
        values = warps.wide(read(warps)).reshape(-1, WARP)
        write(warps, function.reduce(values, axis=1, dtype=values.dtype).repeat(WARP), mask)

    return reduce_warps


def _select(instruction: Instruction, operands: Operands) -> Execute:
    target, yes, no, condition = instruction.operands
    bits = bits_of_type(instruction.type)
    read_yes, read_no = operands.reader(yes, bits), operands.reader(no, bits)
    choose, write = operands.reader(condition, 1), operands.writer(target)
    return lambda warps, mask: write(warps, np.where(choose(warps), read_yes(warps), read_no(warps)), mask)


def _nothing(instruction: Instruction, operands: Operands) -> Execute:
    return lambda warps, mask: None


def _at(lanes: Array, values: Array, num_lanes: int) -> Array:
    """The values of some lanes, among those of all."""
    if len(lanes) == num_lanes:
        return values
    result = np.zeros(num_lanes, values.dtype)
    result[lanes] = values
    return result


BUILDERS: Mapping[str, Build] = {
    "ld": _load,
    "st": _store,
    "cp": _copy,
    "mov": _move,
    "cvta": _move,
    "selp": _select,
    "shfl": _shuffle,
    "redux": _reduce,
    **dict.fromkeys(("membar", "fence", "griddepcontrol", "discard", "prefetch"), _nothing),
}
