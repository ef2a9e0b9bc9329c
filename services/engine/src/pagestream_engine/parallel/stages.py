"""The stages of a pipeline: which layers each has, and what goes from one to the next within a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from pagestream_engine.errors import InvariantViolation
from pagestream_engine.parallel.progress import RankProgress, open_progress
from pagestream_engine.parallel.rank import OwnRank
from pagestream_engine.parallel.ranks import ONE_RANK, DistributedRanks, Ranks

_MOST_SENT = 64
"""Tensors that a stage keeps until others have received them: more than there are steps in flight."""
Arriving = Callable[[], Tensor]
"""Waits for a tensor that another stage sends."""


class Stage:
    """A process that has all layers. `DistributedStage` has those of one stage."""

    index, count = 0, 1
    is_first = True
    """Whether it has the embedding."""
    is_last = True
    """Whether it has the head, and samples."""
    notes_layers = False
    """Whether others wait for it, and `note_layer` is to be called."""

    def note_layer(self) -> None:
        """Note that a layer of a step is launched."""

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        """Wait for the hidden states of the stage before, in the order in which it sends them."""
        raise InvariantViolation(f"stage {self.index} of {self.count}: expected no stage before it")

    def send(self, hidden: Tensor) -> None:
        """Send hidden states to the stage after this one, which may still be at an earlier step."""
        raise InvariantViolation(f"stage {self.index} of {self.count}: expected no stage after it")

    def send_tokens(self, tokens: Tensor, stage: int) -> None:
        """Send a step's tokens from the last stage to another one."""
        raise InvariantViolation(f"stage {self.index} of {self.count}: expected no other stage")

    def receive_tokens(self, shape: tuple[int, ...]) -> Arriving:
        """Return what waits for the int64 tokens of the oldest step that the last stage has not sent yet."""
        raise InvariantViolation(f"stage {self.index} of {self.count}: expected no other stage")


ONE_STAGE = Stage()


class UndividedStage(Stage):
    """For a further model, of which a process has all layers: they count as those of the process' own stage."""

    def __init__(self, own: Stage) -> None:
        self._own = own
        self.notes_layers = own.notes_layers

    def note_layer(self) -> None:
        self._own.note_layer()


class DistributedStage(Stage):
    """A stage of several. Its rank exchanges with the ranks of the same `OwnRank.tensor_rank` in other stages.

    Tokens go through a group of their own: NCCL runs what a pair of ranks exchanges in one group in the order of the
    calls, and the hidden states of the next step must not wait for the tokens of this one.
    """

    notes_layers = True

    def __init__(self, own: OwnRank, device: torch.device, dtype: torch.dtype, progress: RankProgress) -> None:
        """Make the group of tokens; `DistributedRanks` has met the others.

        Args:
            device: that computes.
        """
        self.index, self.count = own.stage, own.num_stages
        self.is_first, self.is_last = self.index == 0, self.index == self.count - 1
        self._own = own
        self._device, self._dtype = device, dtype
        self._progress = progress
        self._tokens = dist.new_group()
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        """What others may not have received yet: the memory stays as it is until then."""

    def note_layer(self) -> None:
        self._progress.advance()

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        self.note_layer()
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        dist.recv(hidden, self._rank_in(self.index - 1))
        return hidden

    def send(self, hidden: Tensor) -> None:
        self._send(hidden, self.index + 1, None)

    def send_tokens(self, tokens: Tensor, stage: int) -> None:
        self._send(tokens, stage, self._tokens)

    def receive_tokens(self, shape: tuple[int, ...]) -> Arriving:
        tokens = torch.empty(shape, dtype=torch.int64, device=self._device)
        work = dist.irecv(tokens, self._rank_in(self.count - 1), group=self._tokens)
        if work is None:
            raise InvariantViolation(f"rank {self._own.index}: expected to be in the group of its own stages")

        def wait() -> Tensor:
            work.wait()
            return tokens

        return wait

    def _send(self, x: Tensor, stage: int, group: dist.ProcessGroup | None) -> None:
        self.note_layer()
        while len(self._sent) > _MOST_SENT:
            earlier, _ = self._sent.popleft()
            earlier.wait()
        work = dist.isend(x, self._rank_in(stage), group=group)
        if work is None:
            raise InvariantViolation(f"rank {self._own.index}: expected to be in the group of its own stages")
        self._sent.append((work, x))

    def _rank_in(self, stage: int) -> int:
        return stage * self._own.tensor_size + self._own.tensor_rank


def open_group(own: OwnRank, device: torch.device, dtype: torch.dtype, *, fixed_order: bool) -> tuple[Ranks, Stage]:
    """Return the ranks that divide this process' layers, and its stage; waits for the others of the group.

    Args:
        device: that computes; the current one, if it is a GPU.
        dtype: of hidden states.
        fixed_order: as `DistributedRanks` has it.
    """
    progress = open_progress(own, device)
    if progress is None:
        return ONE_RANK, ONE_STAGE
    ranks = DistributedRanks(own, device, progress, fixed_order=fixed_order)
    return ranks, ONE_STAGE if own.num_stages == 1 else DistributedStage(own, device, dtype, progress)
