"""Divide a text where its tokenizer surely does: at added tokens, such as those that a chat template puts around
messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pagestream_gateway.core.text.bounds import Part, parts_of

LEAST_CHARS = 128
"""Characters of a segment that is worth a look-up; shorter ones stay with what is around them."""
_KNOWN_MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")


class Segment(NamedTuple):
    """A part of a text, whose tokens are those of the part alone."""

    text: str
    is_kept: bool
    """Whether it holds no added token and is long: a message, or another part that may come again."""


class Segments:
    """Divides texts.

    A tokenizer finds the added tokens that it looks for in raw text from left to right, of several the longest, and
    then normalizes, splits and encodes what lies between them, each for itself. So the tokens of a text are those of
    its parts, where a part begins and ends beside such a token.
    """

    def __init__(self, definition: Mapping[str, Any]) -> None:
        """Read a tokenizer.json. A tokenizer that may look beyond an added token divides nothing."""
        raw = [each for each in definition.get("added_tokens") or [] if not each.get("normalized")]
        contents = sorted((each["content"] for each in raw if each["content"]), key=len, reverse=True)
        is_sure = (
            not any(each.get("lstrip") or each.get("rstrip") or each.get("single_word") for each in raw)
            and definition["model"].get("type", "BPE") in _KNOWN_MODELS
            and not definition["model"].get("dropout")
            and not any(_depends_on_place(each) for each in parts_of(definition.get("pre_tokenizer"), "pretokenizers"))
        )
        self._token = re.compile("|".join(map(re.escape, contents))) if contents and is_sure else None

    @property
    def divides(self) -> bool:
        """Whether it divides any text."""
        return self._token is not None

    def of(self, text: str) -> list[Segment]:
        """Return the parts of a text, in order."""
        found, begun, start = list[Segment](), 0, 0
        matches = self._token.finditer(text) if self._token is not None else ()
        for begin, end in [*(each.span() for each in matches), (len(text), len(text))]:
            if self.divides and begin - start >= LEAST_CHARS:
                if start > begun:
                    found.append(Segment(text[begun:start], False))
                found.append(Segment(text[start:begin], True))
                begun = begin
            start = end
        if len(text) > begun:
            found.append(Segment(text[begun:], False))
        return found


def _depends_on_place(part: Part) -> bool:
    return part is not None and part["type"] == "Metaspace" and part.get("prepend_scheme") == "first"
