"""Where tokens begin in the text that an answer shows, in characters: the column `text_offset` of completions."""

from pagestream.v1.inference_pb2 import LogprobEntry
from pagestream_grammars import TokenTable

_NEAR_BYTES = 64
"""How far a token is looked for in a prompt that the tokenizer has normalized."""


def _num_begun(data: bytes) -> int:
    """Return how many characters begin in a part of UTF-8."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


class EchoOffsets:
    """Of a prompt's tokens, in the text that is echoed.

    That has no special tokens that the tokenizer has put around it, and no space that it has put before it. A token
    within a character, or of no text, is where that character, or the next token, begins.
    """

    def __init__(self, text: str) -> None:
        self._text = text.encode("utf-8", "replace")
        self._byte = 0
        self._begun = 0

    def next(self, entry: LogprobEntry, table: TokenTable | None) -> int:
        """Return the place of the next token."""
        text, place = self._text, self._byte
        spelled = entry.text.encode() if table is None else table.spelled(entry.token_id)
        length = len(spelled)
        if not text.startswith(spelled, place):
            if spelled[:1] == b" " and text.startswith(spelled[1:], place):
                length -= 1
            elif table is not None and entry.token_id in table.special_ids:
                length = 0
            elif (found := text.find(spelled, place, place + _NEAR_BYTES)) >= 0:
                self._advance(found - place)
            else:
                changed = text[place : place + 4 * len(entry.text)].decode(errors="ignore")[: len(entry.text)]
                length = len(changed.encode())
        within = self._text[self._byte : self._byte + 1]
        offset = self._begun - (bool(within) and not _num_begun(within))
        self._advance(length)
        return offset

    def _advance(self, length: int) -> None:
        self._begun += _num_begun(self._text[self._byte : self._byte + length])
        self._byte += length


class OutputOffsets:
    """Of an output's tokens, in the text that is generated.

    By their own bytes, whenever these are shown: a character may come with a later token.

    Args:
        begin: characters before it.
        hides_special: whether special tokens are not shown.
    """

    def __init__(self, begin: int, *, hides_special: bool) -> None:
        self._begun = begin
        self._hides_special = hides_special
        self._ends_word = False

    def next(self, entry: LogprobEntry, table: TokenTable | None) -> int:
        """Return the place of the next token."""
        if table is None:
            offset, self._begun = self._begun, self._begun + len(entry.text)
            return offset
        if self._hides_special and entry.token_id in table.special_ids:
            return self._begun
        spelled = table.spelled(entry.token_id)
        self._begun += self._ends_word
        self._ends_word = table.ends_word(entry.token_id)
        is_within = self._begun and spelled and not _num_begun(spelled[:1])
        offset = self._begun - bool(is_within)
        self._begun += _num_begun(spelled)
        return offset
