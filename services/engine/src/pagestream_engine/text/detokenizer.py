"""Tokens to text, one at a time: right for characters that are cut into several tokens.

`tokenizers.DecodeStream` was tried first (0.23): it raises "Invalid prefix" on byte-fallback bytes that form no
character, takes quadratic time over such bytes, and does not show what it holds back. Here a token is a piece of
bytes, and the stream of bytes is decoded as UTF-8, which is linear and never fails.
See docs/decisions/0031-detokenize-from-token-bytes.md.
"""

from __future__ import annotations

import json
import re
from codecs import utf_8_decode
from collections.abc import Callable, Collection, Mapping, Sequence

from tokenizers import Tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONGEST_CHARACTER = 4  # bytes of UTF-8


class Pieces:
    """What each token adds to a text that it does not begin, found on first use: text, or bytes where it is none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = _decoder_kinds(tokenizer)
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in kinds else {}
        self._byte_fallback = "ByteFallback" in kinds
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._shown = _PieceTable(self._bytes)
        self._hidden = _PieceTable(self._bytes, hidden=self._special)

    def table(self, *, skip_special_tokens: bool) -> Mapping[int, str | bytes]:
        """The piece of each token. An id without a token (a padded vocabulary) is empty."""
        return self._hidden if skip_special_tokens else self._shown

    def shown(self, token_id: int) -> str:
        """The token alone, special ones too, as a text that a person can read: U+FFFD for what is no character."""
        piece = self._shown[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._byte_of:
            byte_of = self._byte_of
            return bytes(map(byte_of.__getitem__, token)) if all(c in byte_of for c in token) else token.encode()
        fallback = _BYTE_FALLBACK.fullmatch(token) if self._byte_fallback else None
        if fallback:
            return bytes((int(fallback[1], 16),))
        return self._after_itself(token_id).encode()

    def _after_itself(self, token_id: int) -> str:
        """A decoder may treat the first token differently (strip its space), so the second of two is taken."""
        once = self._tokenizer.decode([token_id], skip_special_tokens=False)
        twice = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return twice[len(once) :]


class _PieceTable(dict[int, str | bytes]):
    """Finds a piece when it is first asked for."""

    def __init__(self, read: Callable[[int], bytes], hidden: Collection[int] = ()) -> None:
        super().__init__()
        self._read = read
        self._hidden = hidden

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self[token_id] = "" if token_id in self._hidden else _text_if_complete(self._read(token_id))
        return piece


class IncrementalDetokenizer:
    """The text of one sequence's output, as deltas.

    The text is a pure function of the tokens: the same deltas come out of a replay. For byte-level tokenizers it is
    the UTF-8 text of all bytes with U+FFFD for each maximal invalid part, as `Tokenizer.decode` has it; for byte
    fallback the same rule holds (`decode` spoils valid neighbours of an invalid byte). Spaces at the beginning are
    kept: the output goes on from the prompt.
    """

    __slots__ = ("_pending", "_pieces")

    def __init__(self, pieces: Pieces, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._pieces = pieces.table(skip_special_tokens=skip_special_tokens)
        self._pending = self._unfinished_character(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; bytes of an unfinished character wait."""
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._pending or not piece:
                return piece
            piece = piece.encode()
        raw = self._pending + piece
        text, used = utf_8_decode(raw, "replace", False)
        self._pending = raw[used:]
        return text

    def flush(self) -> str:
        """The rest, now that nothing follows: U+FFFD for an unfinished character."""
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text

    def _unfinished_character(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The bytes at the end of the prompt that the first output tokens may complete to a character."""
        tail = b""
        for token_id in reversed(prompt_token_ids[-2 * _LONGEST_CHARACTER :]):
            piece = self._pieces[token_id]
            if isinstance(piece, str) and piece:
                break
            tail = (piece.encode() if isinstance(piece, str) else piece) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        _, used = utf_8_decode(tail, "replace", False)
        return tail[used:]


def _text_if_complete(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """The types of the decoder and of the decoders inside it."""
    if tokenizer.decoder is None:
        return set()
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return {decoder.get("type", "")} | {inner.get("type", "") for inner in decoder.get("decoders", ())}


def _byte_level_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level token (GPT-2's table): printable bytes stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
