"""One token's log probabilities, before its texts are made."""

from __future__ import annotations

from typing import NamedTuple

from pagestream_engine.request.outputs import TokenLogprob
from pagestream_engine.text.detokenizer import Pieces


class LogprobRow(NamedTuple):
    """The chosen token, then the likeliest ones, without their texts."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """The chosen token's; the others follow in order from 1."""

    def with_texts(self, pieces: Pieces | None) -> tuple[TokenLogprob, ...]:
        """Return what an output has.

        Args:
            pieces: makes the tokens' texts; None leaves them empty.
        """
        return tuple(
            TokenLogprob(token_id, logprob, index or self.rank, pieces.shown(token_id) if pieces is not None else "")
            for index, (token_id, logprob) in enumerate(zip(self.token_ids, self.logprobs, strict=True))
        )
