"""Drafts from a sequence's own tokens: what followed where its last tokens stood before ("prompt lookup")."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np

from pagestream_engine.features.speculation.drafts import RowCount
from pagestream_engine.plan import NewSequence

_WIDTH = 4
"""Bytes of a token."""
MAX_WINDOW = 8192
"""Tokens that are searched, the latest ones: bounds the time of a search to some 10 microseconds."""


class NgramProposer:
    """The tokens of each row, prompt and output, and drafts from them.

    Args:
        shortest: fewest last tokens that must have stood before.
        longest: most that are compared; the place where the most of them agree is taken, the latest of several.
    """

    def __init__(self, max_num_seqs: int, shortest: int, longest: int) -> None:
        self._tokens = [bytearray() for _ in range(max_num_seqs)]
        self._shortest, self._longest = shortest, longest

    def start(self, new: NewSequence) -> None:
        """Take a sequence with the tokens that it has."""
        self._tokens[new.row] = bytearray(new.token_ids.astype("<i4").tobytes())

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Append what was sampled."""
        for token_id in token_ids:
            self._tokens[row] += token_id.to_bytes(_WIDTH, "little")

    def propose(self, chunks: Sequence[RowCount], wanted: Sequence[RowCount]) -> Sequence[Sequence[int]]:
        """See `Proposer`; chunks of prompts need nothing."""
        return [self._following(row, count) for row, count in wanted]

    def _following(self, row: int, count: int) -> Sequence[int]:
        """Return `count` tokens that may come next, or none.

        Where fewer follow the place that was found, they are repeated: the sequence is in a loop then.
        """
        tokens = self._tokens[row]
        start = self._find(tokens)
        if start < 0:
            return ()
        following = np.frombuffer(tokens, "<i4", offset=start)
        return list(islice(cycle(following[:count].tolist()), count))

    def _find(self, tokens: bytearray) -> int:
        """Return the offset behind the place where the last tokens stood before; -1: nowhere."""
        found = -1
        for length in range(self._shortest, self._longest + 1):
            place = _rfind(tokens, length * _WIDTH)
            if place < 0:
                break  # What is longer stands nowhere either.
            found = place + length * _WIDTH
        return found


def _rfind(tokens: bytearray, size: int) -> int:
    """Return the offset of the latest place before the end that has the last `size` bytes; -1: none."""
    end, first = len(tokens), max(0, len(tokens) - MAX_WINDOW * _WIDTH)
    if end <= size:
        return -1
    last = bytes(tokens[-size:])
    place = tokens.rfind(last, first, end - _WIDTH)
    while place % _WIDTH and place >= 0:
        place = tokens.rfind(last, first, place + size - 1)
    return place
