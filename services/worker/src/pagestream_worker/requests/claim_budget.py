"""How much of the queue an engine may claim: what it holds, what that still needs, and what is free."""

import asyncio
from collections.abc import Collection, Mapping, Sequence

UNLIMITED_TOKENS = 2**53
MEAN_OVER_REQUESTS = 8  # about so many requests make the running mean of a request's size


class ClaimBudget:
    """The sequences that were claimed and have not ended, with the tokens that they still need computed.

    Args:
        block_size: tokens of a KV block.
        max_num_seqs: most sequences that the engine holds.
        step_tokens: most tokens that one step computes.
    """

    def __init__(self, *, block_size: int, max_num_seqs: int, step_tokens: int) -> None:
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._step_tokens = step_tokens
        self._mean_tokens = float(step_tokens)  # of a claimed request; so large that the first are claimed one by one
        self._prefilling: dict[str, int] = {}  # sequence -> prompt tokens that may not have blocks yet
        self._not_begun: dict[str, int] = {}  # sequence -> prompt tokens that no step has begun to compute
        self._running: set[str] = set()
        self.changed = asyncio.Event()
        """Set when more may be available than before. The claim loop clears it."""

    def available(self, num_free_blocks: int) -> tuple[int, int]:
        """Return how many requests, and how many prompt tokens in all, may be claimed now.

        An idle engine may claim one request of any size: a list of prompts can be larger than the pool, and would wait
        for ever otherwise. An engine that holds a step's worth of tokens beyond its running step claims nothing: a
        request in the queue goes to the first engine with room, one claimed here would wait beside idle engines
        (docs/decisions/0105).
        """
        if not self._running:
            return 1, UNLIMITED_TOKENS
        ahead = self._step_tokens - sum(self._not_begun.values())
        if ahead <= 0:
            return 0, 0
        num_requests = max(1, int(ahead / self._mean_tokens))
        return (
            min(num_requests, self._max_num_seqs - len(self._running)),
            num_free_blocks * self._block_size - sum(self._prefilling.values()),
        )

    def reserve(self, prompt_tokens: int, siblings: Sequence[tuple[str, int]]) -> None:
        """Reserve room for the choices of one prompt.

        Args:
            prompt_tokens: length of the prompt.
            siblings: sequence id, and the number of tokens that other engines have generated for it.
        """
        shared = prompt_tokens  # the first sequence is counted with the prompt, the others with what they add to it
        for seq_id, output_tokens in siblings:
            self._prefilling[seq_id] = self._not_begun[seq_id] = shared + output_tokens
            self._running.add(seq_id)
            shared = self._block_size
        self._mean_tokens += (prompt_tokens - self._mean_tokens) / MEAN_OVER_REQUESTS

    def release(self, seq_ids: Collection[str]) -> None:
        """Free the room of sequences that have ended or left this engine; unknown ones are no error."""
        for seq_id in seq_ids:
            self._prefilling.pop(seq_id, None)
            self._not_begun.pop(seq_id, None)
        self._running.difference_update(seq_ids)
        self.changed.set()

    @property
    def has_prefilling(self) -> bool:
        """Whether some sequence has generated no token here."""
        return bool(self._prefilling)

    def is_prefilling(self, seq_id: str) -> bool:
        """Whether a sequence has generated no token here."""
        return seq_id in self._prefilling

    def note_prefill_step(self, remaining: Mapping[str, int]) -> None:
        """Note that a step with prompts has begun, and the tokens that each of its sequences needs after it."""
        for seq_id, num_tokens in remaining.items():
            if seq_id in self._not_begun:
                self._not_begun[seq_id] = num_tokens
        self.changed.set()

    def note_token(self, seq_id: str) -> bool:
        """Note a generated token. Returns whether it is the sequence's first one here."""
        self._not_begun.pop(seq_id, None)
        is_first = self._prefilling.pop(seq_id, None) is not None
        if is_first:
            self.changed.set()
        return is_first
