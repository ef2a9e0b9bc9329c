"""How much of the queue an engine may take: what it holds, what that still needs, and what is free."""

from collections.abc import Collection, Mapping, Sequence

ANY_NUMBER_OF_TOKENS = 2**53
USUAL_OF_REQUESTS = 8  # the usual size of a request is a mean over about so many


class Seats:
    """The sequences that an engine was given and has not ended, and which of their prompt tokens it has computed.

    Args:
        block_size: tokens of a KV block.
        max_num_seqs: sequences that it holds at most.
        step_tokens: tokens that one step takes at most.
    """

    def __init__(self, *, block_size: int, max_num_seqs: int, step_tokens: int) -> None:
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._step_tokens = step_tokens
        self._usual_tokens = float(step_tokens)  # of a claimed request; so the first ones are claimed one by one
        self._prefilling: dict[str, int] = {}  # sequence -> prompt tokens that may not have blocks yet
        self._ahead: dict[str, int] = {}  # sequence -> prompt tokens that no step that has begun computes
        self._running: set[str] = set()

    def free(self, num_free_blocks: int) -> tuple[int, int]:
        """Return how many requests, and prompt tokens in all, fit now.

        An idle engine takes one of any size (a list of prompts may be larger than the pool), or it would wait for ever.
        One that holds as many tokens as a step takes, beside those that its running step computes, takes nothing: what
        waits in the queue goes to whoever computes it first, what waits here would wait beside idle engines
        (docs/decisions/0105).
        """
        if not self._running:
            return 1, ANY_NUMBER_OF_TOKENS
        ahead = self._step_tokens - sum(self._ahead.values())
        if ahead <= 0:
            return 0, 0
        num_requests = max(1, int(ahead / self._usual_tokens))
        return (
            min(num_requests, self._max_num_seqs - len(self._running)),
            num_free_blocks * self._block_size - sum(self._prefilling.values()),
        )

    def take(self, prompt_tokens: int, siblings: Sequence[tuple[str, int]]) -> None:
        """The choices of one prompt come: sequence, and how many tokens it has from another engine."""
        shared = prompt_tokens  # The first is counted with the prompt, the others with what they add to it.
        for seq_id, output_tokens in siblings:
            self._prefilling[seq_id] = self._ahead[seq_id] = shared + output_tokens
            self._running.add(seq_id)
            shared = self._block_size
        self._usual_tokens += (prompt_tokens - self._usual_tokens) / USUAL_OF_REQUESTS

    def awaits_first_token(self, seq_id: str) -> bool:
        """Whether it has not made a token here."""
        return seq_id in self._prefilling

    @property
    def await_first_tokens(self) -> bool:
        """Whether any has not."""
        return bool(self._prefilling)

    def begin_step(self, lacking: Mapping[str, int]) -> None:
        """A step computes prompts; so many tokens of each are left after it."""
        for seq_id, num_tokens in lacking.items():
            if seq_id in self._ahead:
                self._ahead[seq_id] = num_tokens

    def made_token(self, seq_id: str) -> bool:
        """It has made a token. Returns whether that was its first one here."""
        self._ahead.pop(seq_id, None)
        return self._prefilling.pop(seq_id, None) is not None

    def give_up(self, seq_ids: Collection[str]) -> None:
        """They have ended, or are no longer this engine's."""
        for seq_id in seq_ids:
            self._prefilling.pop(seq_id, None)
            self._ahead.pop(seq_id, None)
        self._running.difference_update(seq_ids)
