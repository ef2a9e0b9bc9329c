"""Text of tokens as they come: pieces of bytes, decoded as UTF-8 (`IncrementalDetokenizer`), and stop strings in it.

`IncrementalDetokenizer` stands in place of `tokenizers.DecodeStream`, which was tried first (0.23): that raises
"Invalid prefix" on byte-fallback bytes that form no character, takes quadratic time over such bytes, and does not show
what it holds back. Here a token is a piece of bytes, and the stream of bytes is decoded as UTF-8, which is linear and
never fails. See docs/design/tool-calls.md#tokenizing-prompts.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import abc
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from pagestream_grammars import TokenTable
from tokenizers import Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class _Word(bytes):
    """A piece that a space follows, unless the text ends there."""


_SPACE = _Word(b" ")


class Pieces:
    """What each token adds to a text that it does not begin, found on first use: text, or bytes where it is none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = TokenTable(tokenizer)
        self._shown = _PieceTable(self._piece)
        self._hidden = _PieceTable(self._piece, hidden=self.tokens.special_ids)

    def table(self, *, skip_special_tokens: bool) -> Mapping[int, str | bytes]:
        """The piece of each token. An id without a token (a padded vocabulary) is empty."""
        return self._hidden if skip_special_tokens else self._shown

    def shown(self, token_id: int) -> str:
        """The token alone, special ones too, as a text that a person can read: U+FFFD for what is no character."""
        piece = self._shown[token_id]
        return piece if isinstance(piece, str) else piece.decode(errors="replace")

    def _piece(self, token_id: int) -> str | bytes:
        raw = self.tokens.spelled(token_id)
        return _Word(raw) if self.tokens.ends_word(token_id) else _text_if_complete(raw)


class _PieceTable(dict[int, str | bytes]):
    """Finds a piece when it is first asked for."""

    def __init__(self, read: Callable[[int], str | bytes], hidden: Collection[int] = ()) -> None:
        super().__init__()
        self._read = read
        self._hidden = hidden

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self[token_id] = "" if token_id in self._hidden else self._read(token_id)
        return piece


class IncrementalDetokenizer:
    """The text of one sequence's output, as deltas.

    The text is a pure function of the tokens: the same deltas come out of a replay. For byte-level tokenizers it is
    the UTF-8 text of all bytes with U+FFFD for each maximal invalid part, as `Tokenizer.decode` has it; for byte
    fallback the same rule holds (`decode` spoils valid neighbours of an invalid byte). Spaces at the beginning are
    kept: the output goes on from the prompt.
    """

    __slots__ = ("_pending", "_pieces")

    def __init__(
        self, pieces: Pieces, prompt_token_ids: abc.Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._pieces = pieces.table(skip_special_tokens=skip_special_tokens)
        self._pending = self._unfinished(prompt_token_ids)

    def push(self, token_id: int) -> str:
        """The text that is certain with this token; bytes of an unfinished character wait, and a space after a word."""
        piece = self._pieces[token_id]
        if isinstance(piece, str):
            if not self._pending or not piece:
                return piece
            raw = self._pending + piece.encode()
        else:
            raw = self._pending + piece
        text, used = utf_8_decode(raw, "replace", False)
        self._pending = _SPACE if isinstance(piece, _Word) else raw[used:]
        return text

    def flush(self) -> str:
        """The rest, now that nothing follows: U+FFFD for an unfinished character."""
        pending, self._pending = self._pending, b""
        return "" if pending is _SPACE else utf_8_decode(pending, "replace", True)[0]

    def _unfinished(self, prompt_token_ids: abc.Sequence[int]) -> bytes:
        """The bytes at the end of the prompt that the first output tokens may complete to a character, or the space
        before them."""
        tail = b""
        for token_id in reversed(prompt_token_ids[-2 * _LONGEST_CHARACTER :]):
            piece = self._pieces[token_id]
            if isinstance(piece, _Word):
                return tail or _SPACE
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


class StopMatch(NamedTuple):
    """What a piece of text came to."""

    text: str
    """What may be shown now."""
    stop_string: str | None
    """The stop string that ended it."""


class StopStringMatcher:
    """Finds the stop string that is complete first, wherever the token borders fall.

    Text that may be the beginning of a stop string is held back until that is decided, so that what was shown is never
    taken back. The result depends on the characters alone, not on how they were cut into pieces, but for one thing:
    what follows the match in the same piece is dropped.
    """

    def __init__(self, stop_strings: abc.Sequence[str], *, include_stop_string: bool = False) -> None:
        self._stops = tuple(stop_strings)
        self._include = include_stop_string
        self._held = ""

    def push(self, text: str) -> StopMatch:
        """Take the next piece of text."""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return StopMatch(text[: end if self._include else start], stop)
        keep = len(text) - self._longest_beginning(text)
        self._held = text[keep:]
        return StopMatch(text[:keep], None)

    def flush(self) -> str:
        """The text that was held back, now that nothing follows."""
        text, self._held = self._held, ""
        return text

    def _longest_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning of some stop string, but not all of it."""
        for length in range(min(len(text), max(map(len, self._stops), default=1) - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


_PANIC = "PanicException"
"""Name of the type that pyo3 raises for a panic of Rust: a BaseException, and one of its own in each extension."""


def is_fault_of_request(error: BaseException) -> bool:
    """Whether an error belongs to the request whose text was made: any Exception, and a panic of the tokenizer.

    What ends the program (KeyboardInterrupt, SystemExit) or a generator does not.
    """
    return isinstance(error, Exception) or type(error).__name__ == _PANIC
