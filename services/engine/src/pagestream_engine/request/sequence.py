"""A sequence: the tokens of one choice, as it is given to the engine and as the engine runs it."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from enum import Enum, auto

from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.token_counts import TokenCounts


@dataclass(frozen=True, slots=True)
class Sibling:
    """One choice among several of one prompt, as it is given to `Engine.add_group`."""

    request_id: str
    """Unique among the unfinished ones; its outputs carry it."""
    params: SamplingParams
    """With `n` 1 and a seed of its own (see `SamplingParams.for_child`)."""
    output_token_ids: Tokens[int] = ()
    """What an earlier run has generated: its next output is the token after them."""


class SequenceState(Enum):
    """Where a sequence stands; it owns blocks only while it runs."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Tokens, block table and progress of one choice.

    `token_ids[:num_computed_tokens]` have their keys and values in the cache: token i in block
    `block_table[i // block_size]` at offset `i % block_size`.
    """

    __slots__ = (
        "arrival",
        "block_hashes",
        "block_table",
        "cache_salt",
        "end_token_ids",
        "group",
        "max_total_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_published_blocks",
        "params",
        "priority",
        "seed",
        "seq_id",
        "state",
        "token_counts",
        "token_ids",
        "was_admitted",
    )

    def __init__(
        self,
        seq_id: str,
        prompt_token_ids: Tokens[int],
        params: SamplingParams,
        *,
        seed: int,
        arrival: int,
        max_total_tokens: int,
        output_token_ids: Tokens[int] = (),
        priority: int = 0,
        cache_salt: bytes = b"",
        end_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.seq_id = seq_id
        self.token_ids: list[int] = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.seed = seed
        """Of its noise, 64 bits signed; never None."""
        self.arrival = arrival
        """Rises with each sequence and survives preemption."""
        self.priority = priority
        self.max_total_tokens = max_total_tokens
        """Prompt and output together: where it ends with "length"."""
        self.cache_salt = cache_salt
        """Adapter, tenant: what must not share blocks although the tokens are equal."""
        self.end_token_ids = end_token_ids
        """Tokens that end it: stop tokens, and the model's own unless ignored. Not to be chosen before min_tokens."""
        self.state = SequenceState.WAITING
        self.was_admitted = False
        """Whether it has run before: its cached tokens are counted once."""
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        """Prompt tokens that the prefix cache had when it was first admitted."""
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        """Chained hashes of its first full blocks, as far as they were needed."""
        self.num_published_blocks = 0
        """Leading blocks of the table that the prefix cache knows (or has another block for)."""
        self.group = SequenceGroup((self,))
        """With its siblings."""
        self.token_counts: TokenCounts | None = None
        """For penalties, as far as the sampler has needed them: a function of `token_ids`."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated, those of a resumed request included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return len(self.token_ids) - self.num_computed_tokens

    def __repr__(self) -> str:
        done, total = self.num_computed_tokens, len(self.token_ids)
        return f"Sequence({self.seq_id!r}, {self.state.name.lower()}, {done}/{total} tokens computed)"


class SequenceGroup:
    """Choices of one prompt, which are admitted, preempted and resumed as one, and end one by one.

    A sequence without siblings is a group of one. Either all members run, or all wait.
    """

    __slots__ = ("followers", "members")

    def __init__(self, members: Tokens[Sequence]) -> None:
        """Take sequences with equal prompts, in the order of their arrival, out of the groups that they were in."""
        self.members = list(members)
        """Those that have not finished."""
        self.followers: list[Sequence] = []
        """Admitted members without blocks: they wait until the prompt is computed by the leader, to share it."""
        for seq in self.members:
            seq.group = self

    def choose_leader(self) -> Sequence:
        """Who computes the prompt: one that ends with it, if there is one, as its logits are then the others' too."""
        return min(self.members, key=lambda seq: seq.num_output_tokens)

    def drop(self, seq: Sequence) -> None:
        """Forget a member that has ended."""
        self.members.remove(seq)
        if seq in self.followers:
            self.followers.remove(seq)

    def split(self) -> SequenceGroup:
        """Take the last member that does not lead others into a group of its own, and return that."""
        last = self.followers[-1] if self.followers else self.members[-1]
        self.drop(last)
        return SequenceGroup((last,))
