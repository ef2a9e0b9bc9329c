"""Global and shared memory, with a check of each access: alignment, bounds, and races between warps."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from support.kernels.emulator.faults import Fault
from support.kernels.emulator.formats import UNSIGNED, Array
from torch import Tensor

_SEVERAL = 63
"""In place of a warp's number: of more than one warp."""
_NEVER = -1


class GlobalMemory:
    """The tensors that a launch may touch, in the host's memory."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = {storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, tensors)}
        regions = sorted((begin, size) for begin, size in storages.items() if size)
        self._begins = np.array([begin for begin, _ in regions], np.uint64)
        self._ends = np.array([begin + size for begin, size in regions], np.uint64)
        self._bytes = [np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin)) for begin, size in regions]

    def load(self, addresses: Array, bits: int, count: int) -> Array:
        """Read `count` neighbouring elements of `bits` at each address: (addresses, count)."""
        places = self._find(addresses, bits // 8 * count)
        result = np.empty((len(addresses), count), UNSIGNED[bits])
        for region, rows, first in self._by_region(places, addresses, bits // 8):
            result[rows] = self._elements(region, bits)[first[:, None] + np.arange(count)]
        return result

    def store(self, addresses: Array, values: Array) -> None:
        """Write the rows of `values` (addresses, elements) to the addresses."""
        size, count = values.dtype.itemsize, values.shape[1]
        places = self._find(addresses, size * count)
        for region, rows, first in self._by_region(places, addresses, size):
            self._elements(region, 8 * size)[first[:, None] + np.arange(count)] = values[rows]

    def _find(self, addresses: Array, size: int) -> Array:
        unaligned = addresses % np.uint64(size) != 0
        if unaligned.any():
            raise Fault(f"misaligned access of {size} bytes at {hex(int(addresses[unaligned][0]))}")
        if not len(self._begins):
            raise Fault(f"{size} bytes at {hex(int(addresses[0]))}: the launch has no tensor with elements")
        places = np.searchsorted(self._begins, addresses, side="right") - 1
        outside = (places < 0) | (addresses + np.uint64(size) > self._ends[places])
        if outside.any():
            address = int(addresses[outside][0])
            begin, end = min(
                ((int(begin), int(end)) for begin, end in zip(self._begins, self._ends, strict=True)),
                key=lambda region: min(abs(address - region[0]), abs(address - region[1])),
            )
            raise Fault(
                f"{size} bytes at {hex(address)} are in no tensor of the launch; the nearest has {end - begin} bytes, "
                f"and the access is {address - begin} bytes from its first"
            )
        return places

    def _by_region(self, places: Array, addresses: Array, size: int) -> Iterable[tuple[int, Array | slice, Array]]:
        """Of each region that is touched: the rows of the access, and the index of each one's first element."""
        first = int(places[0])
        if (places == first).all():
            return [(first, slice(None), ((addresses - self._begins[first]) // np.uint64(size)).astype(np.int64))]
        found = [(int(region), places == region) for region in np.unique(places)]
        return [
            (region, rows, ((addresses[rows] - self._begins[region]) // np.uint64(size)).astype(np.int64))
            for region, rows in found
        ]

    def _elements(self, region: int, bits: int) -> Array:
        data = self._bytes[region]
        return data[: len(data) // (bits // 8) * (bits // 8)].view(UNSIGNED[bits])


@dataclass(slots=True)
class _Copy:
    """Elements that `cp.async` has on their way."""

    places: Array
    """(rows, granules) in shared memory."""
    data: Array
    lanes: Array
    """(rows,): who copies."""
    groups: Array
    """(rows,): the commit group of each."""


class SharedMemory:
    """Shared memory of several programs of a launch, which is poison (NaN) until it is written.

    A race is an access to what another warp wrote, or a write to what another warp read, without a barrier between; and
    an access to what a copy has not delivered. Two warps may write the same bits, as Triton lets them.

    Args:
        num_programs: each with its own.
        size: bytes of one program.
        granule: bytes of the narrowest access: 1, 2 or 4.
    """

    def __init__(self, num_programs: int, size: int, granule: int) -> None:
        self._size, self._granule = size, granule
        dtype = UNSIGNED[8 * granule]
        self._stride = -(-max(size, 1) // granule)  # granules of one program
        total = num_programs * self._stride
        self._data = np.full(total, np.iinfo(dtype).max, dtype)
        self._writers = np.full(total, _NEVER, np.int32)
        self._readers = np.full(total, _NEVER, np.int32)
        self._is_awaited = np.zeros(total, np.bool_)
        self._copies: dict[int, list[_Copy]] = {}
        self._round = 0

    def pass_barrier(self) -> None:
        """Let every warp see what the others wrote."""
        self._round += _SEVERAL + 1

    def load(self, warp: int, programs: Array, addresses: Array, bits: int, count: int) -> Array:
        """Read `count` neighbouring elements of `bits` at each address: (addresses, count)."""
        places = self._places(programs, addresses, bits // 8 * count)
        if self._is_awaited[places].any():
            raise Fault("race: it reads what a copy has not delivered")
        own = self._round + warp
        writers = self._writers[places]
        if ((writers >= self._round) & (writers != own)).any():
            raise Fault("race: it reads what another warp wrote, without a barrier between")
        readers = self._readers[places]
        self._readers[places] = np.where((readers >= self._round) & (readers != own), self._round + _SEVERAL, own)
        return self._data[places].view(UNSIGNED[bits])

    def store(self, warp: int, programs: Array, addresses: Array, values: Array) -> None:
        """Write the rows of `values` (addresses, elements) to the addresses."""
        places = self._places(programs, addresses, values.dtype.itemsize * values.shape[1])
        data = np.ascontiguousarray(values).view(self._data.dtype)
        self._check_write(warp, places, self._data[places] != data)
        self._data[places] = data
        self._writers[places] = self._round + warp

    def begin_copy(
        self, warp: int, programs: Array, addresses: Array, data: Array, *, lanes: Array, groups: Array
    ) -> None:
        """Begin to copy the rows of `data` (addresses, elements), each by a lane, in a commit group of it."""
        places = self._places(programs, addresses, data.dtype.itemsize * data.shape[1])
        self._check_write(warp, places, True)
        self._is_awaited[places] = True
        copy = _Copy(places, np.ascontiguousarray(data).view(self._data.dtype), lanes, groups)
        self._copies.setdefault(warp, []).append(copy)

    def finish_copies(self, warp: int, last_groups: Array) -> None:
        """Deliver each lane's copies up to a group of its own: to all threads behind the next barrier."""
        rest = []
        for copy in self._copies.pop(warp, []):
            is_done = copy.groups <= last_groups[copy.lanes]
            places = copy.places[is_done]
            self._data[places] = copy.data[is_done]
            self._is_awaited[places] = False
            self._writers[places] = self._round + _SEVERAL
            if not is_done.all():
                left = ~is_done
                rest.append(_Copy(copy.places[left], copy.data[left], copy.lanes[left], copy.groups[left]))
        if rest:
            self._copies[warp] = rest

    def check_end(self) -> None:
        """Fault where a copy is still on its way."""
        if self._copies:
            raise Fault("race: it ends before its copies have")

    def _check_write(self, warp: int, places: Array, differs: Array | bool) -> None:
        if self._is_awaited[places].any():
            raise Fault("race: it writes where a copy has not ended")
        own, first = self._round + warp, self._round
        for users, what in ((self._writers, "wrote"), (self._readers, "read")):
            found = users[places]
            if ((found >= first) & (found != own) & differs).any():
                raise Fault(f"race: it writes what another warp {what}, without a barrier between")

    def _places(self, programs: Array, addresses: Array, size: int) -> Array:
        """(addresses, granules)"""
        begins = addresses.astype(np.int64)
        if (begins % size).any():
            raise Fault(f"misaligned access of {size} bytes of shared memory")
        if begins.min() < 0 or begins.max() + size > self._size:
            raise Fault(f"{size} bytes at {begins.max()} of {self._size} bytes of shared memory")
        first = programs * self._stride + begins // self._granule
        return first[:, None] + np.arange(size // self._granule)
