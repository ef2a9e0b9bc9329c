"""What the ranks of a group exchange within a step, by `torch.distributed`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import Tensor

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.parallel.progress import RankProgress
from pagestream_engine.parallel.rank import OwnRank

_LIMIT = timedelta(minutes=30)
"""Of one exchange. Ranks load weights at different speeds; while they serve, the executor notices earlier that one
hangs."""
_WIDE = torch.float32


class Ranks(Protocol):
    """The ranks that this process divides each layer with. All ranks call the same methods in the same order; `least`
    and `first` are for the ranks of all stages together."""

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """Add up the ranks' tensors of one shape; all get the same bits."""
        ...

    def concatenate(self, x: Tensor, num_columns: int) -> Tensor:
        """Put the ranks' (rows, columns) beside each other, rank 0's first, up to `num_columns`; each but the last rank
        that has any brings as many as rank 0."""
        ...

    def least(self, number: int) -> int:
        """Return the least of the ranks' numbers."""
        ...

    def first(self, number: float) -> float:
        """Return rank 0's number."""
        ...

    def first_of_stage(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers of the first rank of this one's stage; each rank has as many."""
        ...


class OneRank:
    """A process that holds a whole model."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def concatenate(self, x: Tensor, num_columns: int) -> Tensor:
        return x[:, :num_columns]

    def least(self, number: int) -> int:
        return number

    def first(self, number: float) -> float:
        return number

    def first_of_stage(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)


ONE_RANK = OneRank()


class DistributedRanks:
    """A group over gloo on a CPU, over NCCL on GPUs."""

    def __init__(self, own: OwnRank, device: torch.device, progress: RankProgress, *, fixed_order: bool) -> None:
        """Meet the other ranks; waits for them.

        Args:
            device: that computes; the current one, if it is a GPU.
            fixed_order: whether sums have one order of additions, whatever the shape. On a CPU they always have.
        """
        if own.folder is None:
            raise InvariantViolation(f"rank {own.index} of {own.size}: given no folder to meet the others in")
        self.rank, self.size = own.tensor_rank, own.tensor_size
        self._own = own
        self._progress = progress
        self._device = device
        self._in_order = fixed_order or device.type == "cpu"
        interface = own.interface if own.store else "lo"
        if sys.platform == "linux" and interface:  # whatever the host name resolves to
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=own.store or f"file://{own.folder / 'store'}",
            rank=own.index,
            world_size=own.size,
            timeout=_LIMIT,
        )
        self._stage_group = self._own_stage(own)

    @staticmethod
    def _own_stage(own: OwnRank) -> dist.ProcessGroup | None:
        """Return the group of the ranks that divide this one's layers; None: all. Every rank makes all groups."""
        if own.num_stages == 1:
            return None
        firsts = range(0, own.size, own.tensor_size)
        groups = [dist.new_group(list(range(first, first + own.tensor_size))) for first in firsts]
        of_stage: dist.ProcessGroup = groups[own.stage]
        return of_stage

    def sum(self, x: Tensor) -> Tensor:
        """In the order of ranks, each element by itself: `all_reduce` of more than two ranks adds in an order that
        depends on an element's place in the tensor, and so on the batch. 16-bit elements are added in float32, and
        rounded once."""
        if not x.numel() or self.size == 1:
            return x
        if not self._in_order:
            total = x.contiguous()
            with self._progress.collective():
                dist.all_reduce(total, group=self._stage_group)
            return total
        first, *others = self._gather(x)
        total = first.to(_WIDE) if x.dtype.itemsize < _WIDE.itemsize else first
        for each in others:
            total += each
        return total.to(x.dtype)

    def concatenate(self, x: Tensor, num_columns: int) -> Tensor:
        if self.size == 1:
            return x[:, :num_columns]
        if not x.numel() and not len(x):
            return x.new_empty(0, num_columns)
        most = -(-num_columns // self.size)
        parts = self._gather(F.pad(x, (0, most - x.shape[1])))
        return torch.cat(parts, dim=1)[:, :num_columns]

    def least(self, number: int) -> int:
        return min(int(each) for each in self._gather_all(torch.tensor([number], device=self._device)))

    def first(self, number: float) -> float:
        return float(self._gather_all(torch.tensor([number], dtype=torch.float64, device=self._device))[0])

    def first_of_stage(self, numbers: Sequence[float]) -> list[float]:
        if self.size == 1:
            return list(numbers)
        first: list[float] = self._gather(torch.tensor(numbers, dtype=torch.float64, device=self._device))[0].tolist()
        return first

    def _gather(self, x: Tensor) -> list[Tensor]:
        return self._gather_from(self.size, self._stage_group, x)

    def _gather_all(self, x: Tensor) -> list[Tensor]:
        return self._gather_from(self._own.size, None, x)

    def _gather_from(self, size: int, group: dist.ProcessGroup | None, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(size)]
        with self._progress.collective():
            dist.all_gather(parts, x, group=group)
        return parts
