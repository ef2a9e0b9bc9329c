"""The tokens of a model as text: what each one adds to an output, which ones are special, which were added."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BATCH = 8192
"""Tokens that are decoded at once."""


class TokenTable:
    """What detokenizer, grammars, call markers and log probabilities know about a tokenizer's tokens.

    Every token passes the decoder, added and special ones too, as in `transformers`. Thread-safe.

    Args:
        tokenizer: as `pagestream_engine.models.tokenizer.load_tokenizer` returns it, or of a model card.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoders = _decoders(tokenizer)
        kinds = {each.get("type") for each in self._decoders}
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """By the tokenizer's files: `skip_special_tokens` hides them, and no text of a grammar matches them."""
        self._contents = {token.content: token_id for token_id, token in added.items()}
        self.word_end = next((str(each.get("suffix")) for each in self._decoders if each["type"] == "BPEDecoder"), "")
        """What the last token of a word ends with, such as </w>: a space, unless the text ends there. Else empty."""

    @cached_property
    def special_contents(self) -> frozenset[str]:
        """What prompts spell special tokens with."""
        return frozenset(content for content, token_id in self._contents.items() if token_id in self.special_ids)

    def added_id(self, content: str) -> int | None:
        """Return the id of the added token that prompts spell so; None where there is none."""
        return self._contents.get(content)

    @property
    def spells_bytes(self) -> bool:
        """Whether tokens can spell any text, each by bytes of its own wherever it stands: what grammars need."""
        return bool(self._byte_of) or self._falls_back

    def spelled(self, token_id: int) -> bytes:
        """Return what a token adds to a text that it does not begin; empty for an id without a token."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        own = self._own_bytes(token)
        return self._decoded([token_id])[0] if own is None else own

    def all_spelled(self, num_tokens: int) -> list[bytes]:
        """Return `spelled` of the first so many ids."""
        names: dict[int, str] = {token_id: token for token, token_id in self._tokenizer.get_vocab().items()}
        found, left = [b""] * num_tokens, list[int]()
        for token_id in filter(names.__contains__, range(num_tokens)):
            own = self._own_bytes(names[token_id])
            if own is None:
                left.append(token_id)
            else:
                found[token_id] = own
        for start in range(0, len(left), _BATCH):
            some = left[start : start + _BATCH]
            for token_id, spelled in zip(some, self._decoded(some), strict=True):
                found[token_id] = spelled
        return found

    def ends_word(self, token_id: int) -> bool:
        """Whether a space follows the token's text, unless the text ends there."""
        return bool(self.word_end) and (self._tokenizer.id_to_token(token_id) or "").endswith(self.word_end)

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes that a token spells one by one, as parts of characters do; None for one that is text."""
        token = self._tokenizer.id_to_token(token_id)
        return None if token is None else self._bytes_of(token)

    def _own_bytes(self, token: str) -> bytes | None:
        """Return what a token adds to a text, where that is known without the decoder."""
        found = self._bytes_of(token)
        return token.encode() if found is None and self._byte_of else found

    def _bytes_of(self, token: str) -> bytes | None:
        if self._byte_of:
            try:
                return token.translate(self._byte_of).encode("latin-1")
            except UnicodeEncodeError:
                return None
        fallback = _BYTE_FALLBACK.fullmatch(token) if self._falls_back else None
        return bytes((int(fallback[1], 16),)) if fallback else None

    def _decoded(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return what tokens add to a text. A decoder may treat the first one differently (strip its space), so the
        second of two is taken."""
        once = self._texts([[token_id] for token_id in token_ids])
        if self.word_end:
            return [text.encode() for text in once]
        twice = self._texts([[token_id, token_id] for token_id in token_ids])
        return [both[len(alone) :].encode() for alone, both in zip(once, twice, strict=True)]

    def _texts(self, lists: Sequence[list[int]]) -> list[str]:
        if len(lists) == 1:  # without threads of its own
            return [self._tokenizer.decode(lists[0], skip_special_tokens=False)]
        texts: list[str] = self._tokenizer.decode_batch(lists, skip_special_tokens=False)
        return texts


def _decoders(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the decoder, or those of a sequence."""
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return list(decoder.get("decoders") or [decoder])


def _byte_level_alphabet() -> dict[int, int]:
    """Return the byte of each character of a byte-level token (GPT-2's table), and of those that are in none what is no
    byte. Printable bytes stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    no_byte = dict.fromkeys(others, 0xFFFD)
    return no_byte | {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}
