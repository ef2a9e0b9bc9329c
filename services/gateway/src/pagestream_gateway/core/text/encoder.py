"""Encode text in pieces: neither time nor memory grow with more of it than can fit."""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from typing import TypeAlias

from tokenizers import Encoding, Tokenizer

from pagestream_gateway.core.text.bounds import is_separable, most_chars_per_token
from pagestream_gateway.core.text.encoding_cache import EncodingCache
from pagestream_gateway.core.text.pairs import PairFrame, frame_of
from pagestream_gateway.core.text.segments import Segments

PIECE_CHARS = 2**16
"""Characters that are encoded at once: a token takes about 400 bytes until its encoding is read, an id takes 4."""
MAX_RUN_CHARS = 2**20
"""Characters without a place to cut; they are one word to the tokenizer, which takes about 100 bytes for each."""


def _is_mark(character: str) -> bool:
    return unicodedata.category(character).startswith("M")


_MARKS = "".join(filter(_is_mark, map(chr, range(0x300, 0x10000))))
# The end of a word for every splitter by categories: a letter before what is neither letter, apostrophe nor mark, or a
# letter and its marks before a blank or a digit. Some splitters take the marks to the word, some to punctuation.
_WORD_END = re.compile(rf"[^\W\d_](?:(?=[\d_])|(?=[^\w'\u2019])(?:(?![{_MARKS}])|[{_MARKS}]+(?=[^\S\r\n]|\d)))")
_MAX_TRIES = 64
_WINDOW_CHARS = 256  # on each side of a border, more than any added token; what is beyond has no say in the border
# Tokens by which a cut at any place can change the count of a text: merges that end at it, and their neighbours.
_CUT_SLACK = 64


class TooManyTokensError(Exception):
    """The text has more tokens than asked for."""

    def __init__(self, found: str, num_tokens: int) -> None:
        super().__init__(found)
        self.found = found
        """How many tokens or characters there are, such as "more than 1023 tokens"."""
        self.num_tokens = num_tokens
        """So many or more."""


class UnbrokenTextError(Exception):
    """The text has too many letters in a row to be encoded in pieces."""


Encoded: TypeAlias = "array[int] | TooManyTokensError | UnbrokenTextError"
"""The ids of a text, or why it has none."""


@dataclass(frozen=True)
class EncodingJob:
    """A text to encode."""

    text: str
    add_special_tokens: bool
    limit: int
    """Most tokens."""
    field: str
    """The field of the request that errors name."""
    scope: bytes = b""
    """Only jobs with an equal one find what the others have encoded."""
    max_fitting: int | None = None
    """Most tokens that fit the model, where more are encoded to say how many there are."""


class TextEncoder:
    """Encodes text of any length as `tokenizer` does, and stops once there are too many tokens.

    `encode_batch_fast` releases Python's lock while it works; `Tokenizer.encode` does not.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the tokenizer's definition, for what it says about texts that are not yet known."""
        definition = json.loads(tokenizer.to_str())
        longest_added = max((len(token["content"]) for token in definition["added_tokens"]), default=0)
        self._tokenizer = tokenizer
        self._chars_per_token = most_chars_per_token(definition)
        self._frame = self._special_tokens()
        self._segments = Segments(definition)
        self._number = next(_NUMBERS)
        self._is_separable = is_separable(definition) and self._frame is not None and longest_added <= _WINDOW_CHARS

    @property
    def frame(self) -> tuple[array[int], array[int]] | None:
        """The special tokens before and after a text; None where the tokenizer changes more than that."""
        return self._frame

    @cached_property
    def pair_frame(self) -> PairFrame | None:
        """What the tokenizer adds to a pair of texts; None where it changes more than that."""
        return frame_of(self._tokenizer)

    def most_chars(self, num_tokens: int) -> int | None:
        """Return how many characters of text so many tokens can stand for at most; None where any number can."""
        return None if self._chars_per_token is None else self._chars_per_token * num_tokens

    def encode(self, text: str, *, add_special_tokens: bool, limit: int) -> array[int]:
        """Return the token ids. Raises TooManyTokensError where there are more than `limit`, UnbrokenTextError."""
        most = self.most_chars(limit)
        if most is not None and len(text) > most:
            raise TooManyTokensError(f"{len(text)} characters, more than {limit} tokens can have", limit + 1)
        if len(text) <= PIECE_CHARS:
            return _ids_of(self._encoding(text, add_special_tokens), limit)
        if self._frame is not None and self._is_separable:
            before, after = self._frame if add_special_tokens else (_NO_IDS, _NO_IDS)
            return before + self._in_pieces(text, limit - len(before) - len(after), limit) + after
        self._check_count(text, limit, limit)
        return _ids_of(self._encoding(text, add_special_tokens), limit)

    def place_of(self, num_tokens: int, text: str) -> tuple[int, int]:
        """Return a place at or before the one where a text has had so many tokens, special ones aside, and how many it
        has before that place; the text's end where it has no more.

        What comes before and after is encoded as it is alone. The place is less than 2 * PIECE_CHARS away, unless the
        text can't be separated.
        """
        place = num_before = 0
        if not self._is_separable:
            return place, num_before
        try:
            for piece in self._pieces(text):
                if len(piece) > 2 * PIECE_CHARS:
                    break
                num_after = num_before + len(self._encoding(piece, add_special_tokens=False))
                if num_after > num_tokens:
                    break
                place, num_before = place + len(piece), num_after
        except UnbrokenTextError:
            pass  # what is left is one word, or has none
        return place, num_before

    def encode_batch(self, jobs: Sequence[EncodingJob], cache: EncodingCache) -> list[Encoded]:
        """Return the token ids of each job or its error, with one call of the tokenizer for what is not cached."""
        found = [self._begin(job, cache) for job in jobs]
        missing = {key: text for each in found if isinstance(each, _Begun) for key, text in each.missing.items()}
        encoded: dict[bytes, array[int]] = {}
        if missing:
            encodings = self._tokenizer.encode_batch_fast(list(missing.values()), add_special_tokens=False)
            encoded = {key: array("I", each.ids) for key, each in zip(missing, encodings, strict=True)}
        return [each.finish(encoded, cache) if isinstance(each, _Begun) else each for each in found]

    def _begin(self, job: EncodingJob, cache: EncodingCache) -> _Begun | Encoded:
        """Look a job's segments up; encode it at once where it has none, or where they are long."""
        most = self.most_chars(job.limit)
        try:
            if self._frame is None or not self._segments.divides or (most is not None and len(job.text) > most):
                return self.encode(job.text, add_special_tokens=job.add_special_tokens, limit=job.limit)
            begun = _Begun(job, self._frame if job.add_special_tokens else (_NO_IDS, _NO_IDS))
            for segment in self._segments.of(job.text):
                key = cache.key(self._number, job.scope, segment.text)
                begun.keys.append(key)
                ids = cache.get(key) if segment.is_kept else None
                if ids is None and len(segment.text) > PIECE_CHARS:
                    ids = self.encode(segment.text, add_special_tokens=False, limit=job.limit)
                if ids is None:
                    begun.missing[key] = segment.text
                else:
                    begun.known[key] = ids
                if segment.is_kept:
                    begun.kept.add(key)
            return begun
        except (TooManyTokensError, UnbrokenTextError) as error:
            return error

    def _in_pieces(self, text: str, room: int, limit: int) -> array[int]:
        ids = array("I")
        for piece in self._pieces(text):
            if len(piece) > 2 * PIECE_CHARS:
                self._check_count(piece, room - len(ids), limit)
            ids.extend(self._encoding(piece, add_special_tokens=False).ids)
            if len(ids) > room:
                raise TooManyTokensError(f"more than {limit} tokens", limit + 1)
        return ids

    def _pieces(self, text: str) -> Iterator[str]:
        start = 0
        while len(text) - start > PIECE_CHARS:
            end = self._border(text, start)
            yield text[start:end]
            start = end
        yield text[start:]

    def _border(self, text: str, start: int) -> int:
        """Return where the piece that begins at `start` ends; the end of the text where that is near."""
        most = min(len(text), start + MAX_RUN_CHARS)
        ends = (found.end() for found in _WORD_END.finditer(text, start + PIECE_CHARS, most))
        for end in islice((end for end in ends if not _is_mark(text[end])), _MAX_TRIES):
            if self._is_border(text, end):
                return end
        if most < len(text):
            raise UnbrokenTextError
        return most

    def _is_border(self, text: str, place: int) -> bool:
        """Return whether the tokenizer splits at `place`, tried on the text around it."""
        left, right = text[max(0, place - _WINDOW_CHARS) : place], text[place : place + _WINDOW_CHARS]
        if self._tokenizer.normalizer is not None:
            left, right = (self._tokenizer.normalizer.normalize_str(side) for side in (left, right))
        words = self._tokenizer.pre_tokenizer.pre_tokenize_str(left + right)
        if all(begin != len(left) for _, (begin, _) in words):
            return False
        both = self._tokenizer.encode_batch_fast([left + right, left, right], add_special_tokens=False)
        whole, *halves = (encoding.ids for encoding in both)
        return bool(whole == halves[0] + halves[1])

    def _check_count(self, text: str, room: int, limit: int) -> None:
        """Raise TooManyTokensError where a text that can't be separated surely has more tokens than `room`.

        `limit` is that of the whole text.
        """
        least = 0
        for start in range(0, len(text), PIECE_CHARS):
            least += len(self._encoding(text[start : start + PIECE_CHARS], add_special_tokens=False)) - _CUT_SLACK
            if least > room:
                raise TooManyTokensError(f"more than {limit} tokens", limit + 1)

    def _encoding(self, text: str, add_special_tokens: bool) -> Encoding:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _special_tokens(self) -> tuple[array[int], array[int]] | None:
        """Return the ids that are added before and after a text; None where more changes than that."""
        bare, framed = self._encoding("a", False).ids, self._encoding("a", True).ids
        for place in range(len(framed) - len(bare) + 1):
            if bare and framed[place : place + len(bare)] == bare:
                return array("I", framed[:place]), array("I", framed[place + len(bare) :])
        return None


_NO_IDS: array[int] = array("I")
_NUMBERS = count()


@dataclass
class _Begun:
    """A job whose segments were looked up."""

    job: EncodingJob
    frame: tuple[array[int], array[int]]
    keys: list[bytes] = field(default_factory=list)
    """Of its segments, in order."""
    known: dict[bytes, array[int]] = field(default_factory=dict)
    missing: dict[bytes, str] = field(default_factory=dict)
    kept: set[bytes] = field(default_factory=set)
    """Those that the cache is to have."""

    def finish(self, encoded: Mapping[bytes, array[int]], cache: EncodingCache) -> array[int] | TooManyTokensError:
        """Return the ids of the whole, or that there are too many of them."""
        ids = self.frame[0][:]
        for key in self.keys:
            part = self.known[key] if key in self.known else encoded[key]
            if key in self.kept:
                cache.put(key, part)
            ids += part
        ids += self.frame[1]
        return TooManyTokensError(f"{len(ids)} tokens", len(ids)) if len(ids) > self.job.limit else ids


def _ids_of(encoding: Encoding, limit: int) -> array[int]:
    if len(encoding) > limit:
        raise TooManyTokensError(f"{len(encoding)} tokens", len(encoding))
    return array("I", encoding.ids)
