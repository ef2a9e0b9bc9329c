"""Which tokens a sequence holds and how often: what penalties look at."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens


class TokenCounts:
    """The different tokens of one sequence, and how often each is in its output.

    A pure function of the sequence's tokens, brought up to date as they grow, so that a resumed or recomputed sequence
    has the same counts. Each new token takes O(1).
    """

    __slots__ = ("_num_seen", "_places", "_with_prompt", "counts", "token_ids")

    def __init__(self, *, with_prompt: bool) -> None:
        """`with_prompt`: whether the prompt's tokens are held too, with count 0 until the output has them."""
        self.token_ids = array("q")
        """Each different token once, int64."""
        self.counts = array("f")
        """How often each is in the output, float32."""
        self._with_prompt = with_prompt
        self._places: dict[int, int] = {}
        self._num_seen = 0

    def catch_up(self, token_ids: Tokens[int], num_prompt_tokens: int) -> None:
        """Take the tokens that came since the last call; `token_ids` are all, the prompt first."""
        if self._num_seen < num_prompt_tokens:
            self._num_seen = num_prompt_tokens
            if self._with_prompt:
                for token_id in dict.fromkeys(token_ids[:num_prompt_tokens]):
                    self._place(token_id)
        for token_id in token_ids[self._num_seen :]:
            self.counts[self._place(token_id)] += 1.0
        self._num_seen = len(token_ids)

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self.token_ids):
            self.token_ids.append(token_id)
            self.counts.append(0.0)
        return place
