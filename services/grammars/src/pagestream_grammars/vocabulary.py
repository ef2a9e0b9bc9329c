"""A tokenizer as grammars see it: each token by the bytes that it adds to an output, so that what matches is what is
shown.

llguidance can read a tokenizer.json by itself. It then takes each added token for a special one, whatever the file
says, gives others the text of their names, and writes the text of a special token with that token.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from pagestream_grammars.tokens import TokenTable

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

_MARKER = b"\xff"
"""Before the name of a special token: no text has this byte."""
_LEADS = ("", "\n")
"""What is encoded before a text, so that a space that the tokenizer puts before a text is not at the text's own."""
_NAMES = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s]+>)')
"""In Lark: what may hold a token's name as text, and names of special tokens."""


class _Spelling:
    """What llguidance asks of a tokenizer. Thread-safe."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, table: TokenTable, num_tokens: int, ends: Sequence[int]) -> None:
        self.eos_token_id = ends[0]
        self.special_token_ids = sorted(token_id for token_id in table.special_ids.union(ends) if token_id < num_tokens)
        self.tokens = table.all_spelled(num_tokens)
        for token_id in self.special_token_ids:
            self.tokens[token_id] = _MARKER + (tokenizer.id_to_token(token_id) or "").encode()
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # A grammar's text is text.

    def __call__(self, text: str) -> list[int]:
        """Return the tokens that spell a text, as the tokenizer writes it where those do."""
        wanted = text.encode()
        for lead in _LEADS:
            ids = self._tokenizer.encode_batch_fast([lead + text], add_special_tokens=False)[0].ids
            num_before = sum(len(self.tokens[token_id]) for token_id in ids) - len(wanted)
            place = 0
            while num_before > 0 and place < len(ids):
                num_before -= len(self.tokens[ids[place]])
                place += 1
            if num_before == 0 and b"".join([self.tokens[token_id] for token_id in ids[place:]]) == wanted:
                return list(ids[place:])
        return self._longest_first(wanted)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """The first token of each text; no text is a special one's."""
        return {spelled: token_id for token_id, spelled in reversed(list(enumerate(self.tokens))) if spelled}

    def _longest_first(self, wanted: bytes) -> list[int]:
        """Return the tokens of a text that the tokenizer changes; up to the first byte that no token spells."""
        known, ids, place = self._ids, list[int](), 0
        longest = max(map(len, known), default=0)
        while place < len(wanted):
            ends = range(min(len(wanted), place + longest), place, -1)
            end = next((end for end in ends if wanted[place:end] in known), None)
            if end is None:
                break
            ids.append(known[wanted[place:end]])
            place = end
        return ids


def grammar_tokenizer(
    tokenizer: Tokenizer, num_tokens: int, end_token_ids: Collection[int], table: TokenTable | None = None
) -> LLTokenizer:
    """Return a tokenizer for `LLMatcher`. Special tokens and those that end an output match no text.

    Args:
        tokenizer: nobody else's: it encodes the texts of special tokens as text from now on.
        num_tokens: of the model's vocabulary; the tokenizer may have fewer.
        end_token_ids: at least one.
        table: of the tokenizer, where there is one.

    Raises:
        ValueError: the tokenizer's tokens are no bytes, as those of whole words.
    """
    from llguidance import LLTokenizer

    table = table or TokenTable(tokenizer)
    if not table.spells_bytes:
        raise ValueError("its decoder is neither ByteLevel nor has it a ByteFallback")
    ends = sorted(end_token_ids)
    return LLTokenizer(_Spelling(tokenizer, table, num_tokens, ends), n_vocab=num_tokens, eos_token=ends)  # type: ignore[arg-type]


def with_token_ids(rules: str, table: TokenTable) -> str:
    """Return rules of Lark in which `<name>` of an added token that isn't special is that token by its id, as
    llguidance has it for special ones by their names."""

    def by_id(found: re.Match[str]) -> str:
        token_id = None if found[1] is None else table.added_id(found[1])
        return found[0] if token_id is None or token_id in table.special_ids else f"<[{token_id}]>"

    return _NAMES.sub(by_id, rules)
