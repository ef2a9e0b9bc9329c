"""How much of the queue an engine may claim: what it holds, what that still needs, and what is free."""

import asyncio
from collections.abc import Collection, Mapping, Sequence

from pagestream_engine.plan import KVGroup, KVLayout
from pagestream_engine.scheduler.admission import MOST_PASSING, RESERVE_SHARE

UNLIMITED_TOKENS = 2**53
MEAN_OVER_REQUESTS = 8  # about so many requests make the running mean of a request's size


class ClaimBudget:
    """The sequences that were claimed and have not ended, with the tokens and KV blocks that they still need.

    Args:
        kv_layout: the KV groups in which a sequence takes blocks.
        max_num_seqs: most sequences that the engine holds.
        step_tokens: most tokens that one step computes.
    """

    def __init__(self, *, kv_layout: KVLayout, max_num_seqs: int, step_tokens: int) -> None:
        self._layout = kv_layout
        self._max_num_seqs = max_num_seqs
        self._step_tokens = step_tokens
        self._mean_tokens = float(step_tokens)  # of a claimed request; so large that the first are claimed one by one
        self.prefilling: dict[str, int] = {}
        """Sequences that have generated no token here, with the KV blocks that they may not have yet."""
        self._not_begun: dict[str, int] = {}  # sequence -> prompt tokens that no step has begun to compute
        self._running: set[str] = set()
        self._extra: dict[str, int] = {}  # sequence without a token before its end -> others that it stands for
        self._whole: dict[str, int] = {}  # sequence of a search that has not begun -> the seats that it needs at once
        self._num_passing = 0  # sequences that were claimed since such a search waits
        self._first_class: set[str] = set()
        self._claims_ahead = True
        self.changed = asyncio.Event()
        """Set when more may be available than before. The claim loop clears it."""

    def available(self, num_free_blocks: int) -> tuple[int, int]:
        """Return how many requests, and how many prompt tokens in all, may be claimed now.

        An idle engine may claim one request of any size: a list of prompts can be larger than the pool, and would wait
        for ever otherwise. An engine that holds a step's worth of tokens beyond its running step claims nothing: a
        request in the queue goes to the first engine with room, one claimed here would wait beside idle engines
        (docs/design/queueing.md).
        """
        if not self._running:
            return 1, UNLIMITED_TOKENS
        not_begun = sum(self._not_begun.values())
        if not_begun and not self._claims_ahead:
            return 0, 0
        ahead = self._step_tokens - not_begun
        if ahead <= 0:
            return 0, 0
        num_requests = min(max(1, int(ahead / self._mean_tokens)), self._max_num_seqs - self._num_seats)
        num_blocks = num_free_blocks - sum(self.prefilling.values())
        if num_requests < 1 or num_blocks < 1:
            return 0, 0
        while True:
            num_tokens = self._tokens_that_fit(num_blocks, num_requests)
            if num_requests == 1 or num_tokens >= num_requests * self._mean_tokens:
                return num_requests, num_tokens
            num_requests //= 2  # fewer leave more: each one's last block of a group may be nearly empty

    def limit_sequences(self, most: int) -> None:
        """Claim for at most so many sequences at once from now on; what is claimed stays."""
        self._max_num_seqs = most
        self.changed.set()

    def limit_lookahead(self, *, claims_ahead: bool) -> None:
        """Claim nothing while a claimed prompt is not computed to its end, unless `claims_ahead`."""
        self._claims_ahead = claims_ahead
        self.changed.set()

    @property
    def _num_running(self) -> int:
        return len(self._running) + sum(self._extra.values())

    @property
    def _num_seats(self) -> int:
        """Seats that are taken, or wanted by what would start before a newcomer.

        A search that waits for its seats, all at once, is passed by as many sequences as admission lets pass.
        """
        waiting = sum(self._whole.values()) if self._num_passing < MOST_PASSING else 0
        return self._num_running - waiting

    def may_interrupt(self) -> bool:
        """Return whether a request of class 0 may be claimed without room: the engine takes a seat for it from a lower
        class. One at a time, so that others go to engines with room.
        """
        first = self._first_class
        return len(first) < min(self._max_num_seqs, self._num_running) and not any(
            self.prefilling.get(seq_id) for seq_id in first
        )

    def _tokens_that_fit(self, num_blocks: int, num_requests: int) -> int:
        """Return the tokens that so many sequences may have together and be admitted, however they divide them."""
        num_blocks -= -(-num_requests // RESERVE_SHARE)  # what admission keeps free beside them
        sizes = [group.block_size for group in self._layout.groups if group.spec.window is None]
        fits, too_many = 0, max(0, num_blocks) * min(sizes) + 1 if sizes else UNLIMITED_TOKENS
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._most_blocks(middle, num_requests) <= num_blocks:
                fits = middle
            else:
                too_many = middle
        return fits

    def _most_blocks(self, num_tokens: int, num_requests: int) -> float:
        """Return a bound of the blocks that so many sequences hold with `num_tokens` in all.

        A window's blocks grow with a sequence only until it is full, so equal parts hold most.
        """
        if num_requests == 1:
            return self._layout.num_blocks_for(num_tokens, self._step_tokens)
        each = num_tokens / num_requests
        return num_requests * sum(self._most_blocks_of(group, each) for group in self._layout.groups)

    def _most_blocks_of(self, group: KVGroup, num_tokens: float) -> float:
        by_tokens = (num_tokens + group.block_size - 1) / group.block_size
        if group.spec.window is None:
            return by_tokens
        return min(by_tokens, group.max_blocks_held(UNLIMITED_TOKENS, self._step_tokens))

    def reserve(
        self,
        prompt_tokens: int,
        siblings: Sequence[tuple[str, int]],
        *,
        priority: int = 0,
        num_at_end: int = 0,
        is_search: bool = False,
    ) -> None:
        """Reserve room for the choices of one prompt.

        Args:
            siblings: sequence id, and the number of tokens that other engines have generated for it.
            num_at_end: sequences that they are chosen from, which have no token before their end; 0: they have.
            is_search: whether these are beams, which start all at once.
        """
        if self._whole:
            self._num_passing += max(num_at_end, len(siblings))
        if is_search and num_at_end > self._max_num_seqs - self._num_seats:
            self._whole[siblings[0][0]] = num_at_end
        num_extra = max(0, num_at_end - len(siblings))
        if num_at_end:
            self._extra.update((seq_id, 0) for seq_id, _ in siblings)
            self._extra[siblings[0][0]] = num_extra
        if priority == 0:
            self._first_class.update(seq_id for seq_id, _ in siblings)
        # The first sequence is counted with the prompt, the others with what they add to it.
        to_compute, num_shared, groups = prompt_tokens, 0, self._layout.groups
        for seq_id, output_tokens in siblings:
            num_tokens = prompt_tokens + max(int(num_shared > 0), output_tokens)
            self._not_begun[seq_id] = to_compute + output_tokens
            self.prefilling[seq_id] = sum(self._blocks_beside(group, num_shared, num_tokens) for group in groups)
            self._running.add(seq_id)
            to_compute, num_shared = self._layout.block_size, prompt_tokens
        own = sum(self._blocks_beside(group, prompt_tokens, prompt_tokens + 1) for group in groups)
        self.prefilling[siblings[0][0]] += num_extra * own
        self._mean_tokens += (prompt_tokens - self._mean_tokens) / MEAN_OVER_REQUESTS

    def _blocks_beside(self, group: KVGroup, num_shared_tokens: int, num_tokens: int) -> int:
        """Return the blocks that a sequence takes beside full ones of its first `num_shared_tokens`; none of a window
        is shared for ever.
        """
        held = group.max_blocks_held(num_tokens, self._step_tokens)
        return held if group.spec.window is not None else held - num_shared_tokens // group.block_size

    def release(self, seq_ids: Collection[str]) -> None:
        """Free the room of sequences that have ended or left this engine; unknown ones are no error."""
        for seq_id in seq_ids:
            self.prefilling.pop(seq_id, None)
            self._not_begun.pop(seq_id, None)
            self._extra.pop(seq_id, None)
            self._forget_whole(seq_id)
        self._running.difference_update(seq_ids)
        self._first_class.difference_update(seq_ids)
        self.changed.set()

    def begin_prefills(self, remaining: Mapping[str, int]) -> None:
        """Note that a step with prompts has begun, and the tokens that each of its sequences needs after it."""
        for seq_id, num_tokens in remaining.items():
            comes_at_end = seq_id in self._extra
            if not self._claims_ahead and not comes_at_end:
                continue  # it counts until its first token
            if seq_id in self._not_begun:
                self._not_begun[seq_id] = num_tokens
            if not num_tokens and comes_at_end:
                self.prefilling[seq_id] = 0
            self._forget_whole(seq_id)
        self.changed.set()

    def _forget_whole(self, seq_id: str) -> None:
        """Note that a sequence has begun, or left."""
        if self._whole.pop(seq_id, None) is not None and not self._whole:
            self._num_passing = 0

    def end_prefill(self, seq_id: str) -> None:
        """Note a sequence's first token here."""
        del self.prefilling[seq_id]
        self._not_begun.pop(seq_id, None)
        self.changed.set()
