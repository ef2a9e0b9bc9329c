"""What an engine has done, and how long it took; and a map of its blocks."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class EngineStats(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A snapshot. Counters count from the engine's start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    """Blocks that no sequence references; some can still be found by the prefix cache."""
    num_cached_blocks: int
    """Free blocks that the prefix cache can still find."""
    num_claimable_blocks: int
    """Free blocks beyond what preempted sequences need again, and what admission keeps for the growth of others."""
    kv_utilization: float
    """Referenced blocks / all blocks, in [0, 1]."""
    kv_demand: float
    """(Referenced blocks + blocks that preempted sequences need again) / all blocks; above 1 the pool does not hold
    what was admitted."""
    prefix_query_tokens: int
    """Prompt tokens of new requests that were looked up in the prefix cache: not again after a preemption, nor of
    requests that another engine has begun, and once for all choices of a prompt."""
    prefix_hit_tokens: int
    """Tokens that were found there."""
    host_hit_tokens: int
    """Tokens whose blocks came from host memory, of new requests and of preempted ones."""
    num_host_pages: int
    """Pages of host memory, each for one block; 0 without `swap_space`."""
    num_used_host_pages: int
    """Those that hold a block which can be found."""
    saved_bytes: int
    """Copied from blocks to host memory."""
    loaded_bytes: int
    """Copied from host memory to blocks."""
    num_preemptions: int
    """Running sequences that lost their blocks for want of free ones; the beams of a search count once."""
    num_displaced: int
    """Running sequences that lost their places to others, by the policy; the beams of a search count once."""
    num_steps: int
    num_prompt_tokens: int
    """Prompt tokens computed, those of a recomputation included."""
    num_generated_tokens: int
    num_draft_tokens: int
    """Tokens that speculation has drafted and steps have checked."""
    accepted_by_position: tuple[int, ...]
    """Those of them that held, by their place among the drafts of a step: the first, the second, and so on."""
    last_step_sequences: int
    """Sequences that the last collected step computed."""
    last_step_prompt_tokens: int
    """Prompt tokens that it computed."""
    last_step_s: float
    """Seconds that the last step took."""
    last_schedule_s: float
    """Seconds of it that the scheduler and the making of the plan took, without the model."""
    total_step_s: float
    total_schedule_s: float
    num_drafts: int = 0
    """Steps of a sequence that checked drafts."""
    num_late_masks: int = 0
    """Rows that got no token in a step, since the mask of their grammar was not there in time."""

    @property
    def num_accepted_tokens(self) -> int:
        """Drafts that held."""
        return sum(self.accepted_by_position)


MOST_CELLS = 4096
"""Of a map. A larger pool is sampled at equal distances."""
MOST_SEQUENCES = 256
"""Listed in a map."""
MOST_HOLDERS = 8
"""Listed for a block."""
FREE, CACHED, HELD = 0, 1, 2
"""A cell: of a free block without a hash, of a free block with one, and HELD + i of a block that `holders[i]` hold."""


class Holders(NamedTuple):
    """Who holds a referenced block."""

    sequences: tuple[int, ...]
    """Places in `BlockMap.sequences`, ascending: the first MOST_HOLDERS of those that are listed there."""
    num_references: int
    """Its reference count: block tables, listed or not, and copies of it that the next step makes."""


class RunningSequence(NamedTuple):
    """A sequence that is admitted."""

    seq_id: str
    tenant: str
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and output."""
    num_computed_tokens: int
    num_blocks: int
    """Of all its tables; 0 while it waits for its leader."""

    @property
    def is_prefill(self) -> bool:
        """Whether more than its next token is to be computed."""
        return self.num_tokens - self.num_computed_tokens > 1


@dataclass(frozen=True, slots=True)
class BlockMap:
    """The pool between two steps. Bounded: at most about 60 kB."""

    num_blocks: int
    num_free: int
    """Blocks that nothing references, cached ones included."""
    num_cached: int
    """Free blocks that the prefix cache can still find."""
    cells: abc.Sequence[int]
    """See FREE. Cell c of n is block `c * num_blocks // n`."""
    holders: abc.Sequence[Holders]
    """Each once."""
    sequences: abc.Sequence[RunningSequence]
    """The first MOST_SEQUENCES that run."""
    num_running: int
    num_waiting: int
