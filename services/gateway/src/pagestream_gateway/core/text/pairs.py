"""Two texts that a model reads together, as a tokenizer puts them into one prompt."""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass

from tokenizers import Tokenizer

_ROLES = tuple(re.compile(rf"""(['"]){role}\1""") for role in ("query", "document"))


@dataclass(frozen=True)
class PairFrame:
    """The special tokens of a pair."""

    before: array[int]
    between: array[int]
    after: array[int]

    @property
    def num_tokens(self) -> int:
        """Special tokens in all."""
        return len(self.before) + len(self.between) + len(self.after)

    def join(self, query: array[int], document: array[int]) -> array[int]:
        """Return the tokens of a pair from those of its texts, which a tokenizer encodes each by itself."""
        return self.before + query + self.between + document + self.after


NO_FRAME = PairFrame(array("I"), array("I"), array("I"))


def frame_of(tokenizer: Tokenizer) -> PairFrame | None:
    """Return what a tokenizer adds to a pair; None where it changes more than that."""
    bare = [list(tokenizer.encode(text, add_special_tokens=False).ids) for text in ("a", "b")]
    framed = list(tokenizer.encode("a", "b", add_special_tokens=True).ids)
    starts: list[int] = []
    for ids in bare:
        first = starts[-1] + len(bare[0]) if starts else 0
        place = next((at for at in range(first, len(framed)) if ids and framed[at : at + len(ids)] == ids), None)
        if place is None:
            return None
        starts.append(place)
    ends = [start + len(ids) for start, ids in zip(starts, bare, strict=True)]
    parts = framed[: starts[0]], framed[ends[0] : starts[1]], framed[ends[1] :]
    return PairFrame(*(array("I", part) for part in parts))


def is_for_pairs(chat_template: str) -> bool:
    """Whether a chat template makes a prompt of a message of the query and one of the document, by these roles."""
    return all(role.search(chat_template) for role in _ROLES)
