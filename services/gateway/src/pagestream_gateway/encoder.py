"""Encode text in pieces: neither time nor memory grow with more of it than can fit.

A text is divided where its tokenizer surely divides it (at added tokens, such as those of a chat template), ids
of parts that came before are cached, and two texts that a model reads together are put into one prompt
(`TextEncoder`). Threads do this work, which would block the event loop, with a bounded queue (`TokenizePool`); requests
that arrive at the same time are rendered and encoded together (`EncoderPool`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import unicodedata
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, islice
from threading import Lock
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

from pagestream.v1.records_pb2 import RequestSpec
from tokenizers import Encoding, Tokenizer

from pagestream_gateway.errors import InvalidRequest, Overloaded
from pagestream_gateway.settings import LimitSettings

Part = Mapping[str, Any] | None

# Characters that canonical composition can join into one: U+1F82 is an alpha with three marks.
_COMPOSED = 4
_COMPOSING = ("NFC", "NFKC")
_KEEPING_NORMALIZERS = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")
_SEPARABLE_NORMALIZERS = ("NFC", "NFKC", "NFD", "NFKD", "Lowercase")
_KEEPING_SPLITTERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Punctuation", "Split")
_NUM_BYTES = 256


def most_chars_per_token(definition: Mapping[str, Any]) -> int | None:
    """Return how many characters of a text one token can stand for at most; None where there is no such bound.

    `definition` is a tokenizer.json. There is no bound where a part drops characters, strips them, or replaces a run of
    unknown ones by a single token.
    """
    shrink = _shrink(definition.get("normalizer"))
    added = definition.get("added_tokens") or []
    if shrink is None or not _keeps_text(definition.get("pre_tokenizer")) or not _knows_every_byte(definition):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    longest = max(map(len, _vocabulary(definition)), default=1)
    longest_added = max((len(token["content"]) for token in added), default=1)
    return max(longest, longest_added) * shrink


def is_separable(definition: Mapping[str, Any]) -> bool:
    """Return whether the tokens before and after a border of the pre-tokenizer depend on nothing beyond it.

    This holds for borders between a letter and a character that is neither letter nor mark, outside of added tokens.
    """
    splitters = parts_of(definition.get("pre_tokenizer"), "pretokenizers")
    normalizers = parts_of(definition.get("normalizer"), "normalizers")
    model = definition["model"]
    return (
        bool(splitters)
        and all(_is_local(part) for part in splitters)
        and all(part["type"] in _SEPARABLE_NORMALIZERS for part in normalizers)
        and model.get("type", "BPE") == "BPE"
        and not model.get("dropout")
        and all(_is_local_token(token) for token in definition.get("added_tokens") or [])
    )


def parts_of(part: Part, members: str) -> list[Mapping[str, Any]]:
    """Return a part's members where it is a sequence, which its definition lists under `members`, else the part."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [found for member in part[members] for found in parts_of(member, members)]
    return [part]


def _shrink(normalizer: Part) -> int | None:
    """Return how many characters the normalizer can turn into one at most; None where there is no bound."""
    shrink = 1
    for part in parts_of(normalizer, "normalizers"):
        kind = part["type"]
        if kind in _COMPOSING:
            shrink *= _COMPOSED
        elif kind == "Replace" and "String" in part["pattern"] and part["content"]:
            shrink *= -(-len(part["pattern"]["String"]) // len(part["content"]))
        elif kind not in _KEEPING_NORMALIZERS:
            return None
    return shrink


def _keeps_text(pre_tokenizer: Part) -> bool:
    return all(
        part["type"] in _KEEPING_SPLITTERS and part.get("behavior") != "Removed"
        for part in parts_of(pre_tokenizer, "pretokenizers")
    )


def _knows_every_byte(definition: Mapping[str, Any]) -> bool:
    """Return whether each byte has a token, so that no character is unknown."""
    model = definition["model"]
    if model.get("type", "BPE") not in ("BPE", "Unigram"):
        return False
    vocabulary = _vocabulary(definition)
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(_NUM_BYTES))
    all_parts = (
        *parts_of(definition.get("pre_tokenizer"), "pretokenizers"),
        *parts_of(definition.get("normalizer"), "normalizers"),
    )
    if not any(part["type"] == "ByteLevel" for part in all_parts):
        return False
    return sum(len(token) == 1 for token in vocabulary) >= _NUM_BYTES


def _vocabulary(definition: Mapping[str, Any]) -> set[str]:
    vocabulary = definition["model"]["vocab"]
    return set(vocabulary) if isinstance(vocabulary, Mapping) else {entry[0] for entry in vocabulary}


def _is_local(splitter: Mapping[str, Any]) -> bool:
    """Return whether what is before a border has no say in where later ones are."""
    kind = splitter["type"]
    if kind == "ByteLevel":
        return True
    if kind == "Split":
        pattern = splitter["pattern"]
        looks_back = "(?<" in str(pattern) or "\\b" in str(pattern)
        return splitter["behavior"] == "Isolated" and not splitter.get("invert") and not looks_back
    return bool(kind == "Digits")


def _is_local_token(token: Mapping[str, Any]) -> bool:
    """Return whether the text around an added token has no say in whether it is one."""
    return not (token.get("lstrip") or token.get("rstrip") or token.get("single_word"))


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


_ENTRY_BYTES = 300
"""Of a key, an array and their places in the dictionary, beside the ids."""


class EncodingCache:
    """Ids by digest, least recently used out first. Any thread may use it."""

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of all entries; 0 keeps nothing."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, array[int]] = OrderedDict()
        self._lock = Lock()
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0

    def key(self, encoder: int, scope: bytes, text: str) -> bytes:
        """Return the key of a text.

        `encoder` is the number of its encoder; `scope` the cache salt of its request: what was encoded with another one
        is not found, since the time of an answer would tell of it (docs/design/prefix-cache.md).
        """
        digest = hashlib.blake2b(text.encode(), digest_size=24, key=scope)
        digest.update(b"%d" % encoder)
        return digest.digest()

    def get(self, key: bytes) -> array[int] | None:
        """Return the ids of a text, or nothing."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self.num_misses += 1
                return None
            self.num_hits += 1
            self._entries.move_to_end(key)
            return found

    def put(self, key: bytes, ids: array[int]) -> None:
        """Keep the ids of a text; nobody may change them."""
        size = _bytes_of(ids)
        with self._lock:
            if key in self._entries or size > self._max_bytes:
                return
            self._entries[key] = ids
            self.num_bytes += size
            while self.num_bytes > self._max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.num_bytes -= _bytes_of(oldest)


def _bytes_of(ids: array[int]) -> int:
    return len(ids) * ids.itemsize + _ENTRY_BYTES


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


logger = logging.getLogger(__name__)
T = TypeVar("T")


class TokenizePool:
    """Runs CPU work of requests in threads, with a bounded queue."""

    def __init__(self, *, workers: int, max_pending: int, limit_s: float) -> None:
        """Start no thread yet.

        Args:
            workers: number of threads.
            max_pending: calls that run or wait; one more raises Overloaded.
            limit_s: seconds that one call may take, its wait included.
        """
        self._executor = ThreadPoolExecutor(workers, thread_name_prefix="tokenize")
        self._max_pending = max_pending
        self._num_pending = 0
        self._limit_s = limit_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raises Overloaded where too much waits or it takes too long."""
        if self._num_pending >= self._max_pending:
            raise Overloaded(
                f"too many requests wait for the tokenizer, at most {self._max_pending}", retry_after_s=1.0
            )
        self._num_pending += 1
        future = self._executor.submit(_guarded, work)
        # Counted until the thread is done with it, also after its caller was cancelled: the bound is on the work.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._release) if not loop.is_closed() else None)
        try:
            async with asyncio.timeout(self._limit_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise Overloaded(f"tokenizing took longer than {self._limit_s:g} s", retry_after_s=5.0) from error

    def start(self, work: Callable[[], object]) -> None:
        """Run `work` in a thread, without a bound and without a result: its caller has both."""
        self._executor.submit(work)

    def _release(self) -> None:
        self._num_pending -= 1


def error_of_work(error: BaseException) -> Exception:
    """Return what a thread's work has raised. A panic in the tokenizer's Rust is a BaseException alone."""
    if isinstance(error, Exception):
        return error
    failure = InvalidRequest(None, f"the model's tokenizer fails on it: {str(error)[:200]}")
    failure.__cause__ = error
    return failure


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except BaseException as error:  # noqa: BLE001  it is raised where the work is waited for
        raise error_of_work(error) from error.__cause__


Preparation = Generator[list[EncodingJob], list[Encoded], RequestSpec]
"""Renders a request, yields its texts once, gets what came of them, and returns the request's record."""

_MOST_REQUESTS = 32  # of a batch: the first one waits for the rendering of the last one
_MOST_CHARS = 4 * PIECE_CHARS  # of a batch


class _Work:
    """One draft on its way through a thread."""

    def __init__(self, preparation: Preparation, encoder: TextEncoder, *, cuts_long_texts: bool) -> None:
        self.encoder = encoder
        self.cuts_long_texts = cuts_long_texts
        self.jobs: list[EncodingJob] = []
        self.done: asyncio.Future[RequestSpec] = asyncio.get_running_loop().create_future()
        self._preparation = preparation
        self._outcome: RequestSpec | Exception | None = None

    def render(self) -> bool:
        """Render the texts; return whether that succeeded."""
        try:
            self.jobs = next(self._preparation)
        except BaseException as error:  # noqa: BLE001  it is raised where the draft is waited for
            self._outcome = error_of_work(error)
        return self._outcome is None

    def encode(self, cache: EncodingCache) -> None:
        """Encode the texts alone, one after the other."""
        try:
            found = [self.encoder.encode_batch([job], cache)[0] for job in self.jobs]
        except BaseException as error:  # noqa: BLE001  it is raised where the draft is waited for
            self._outcome = error_of_work(error)
        else:
            self.finish(iter(found))

    def finish(self, found: Iterator[Encoded]) -> None:
        """Take what came of the texts."""
        try:
            self._preparation.send([next(found) for _ in self.jobs])
        except StopIteration as done:
            self._outcome = done.value
        except BaseException as error:  # noqa: BLE001  it is raised where the draft is waited for
            self._outcome = error_of_work(error)

    def deliver(self) -> None:
        """Give the outcome to who waits for it; called by the event loop."""
        if self.done.done():
            return
        if isinstance(self._outcome, RequestSpec):
            self.done.set_result(self._outcome)
        else:
            self.done.set_exception(self._outcome or RuntimeError("the draft was not prepared"))


class EncoderPool:
    """One for a gateway: threads that take what waits in batches, and a cache of parts of prompts."""

    def __init__(self, pool: TokenizePool, limits: LimitSettings) -> None:
        """`pool`: the threads, which also parse; its bound and its limit count for each draft."""
        self._pool = pool
        self._limits = limits
        self._waiting: deque[_Work] = deque()
        self._lock = Lock()
        self._num_draining = 0
        self._num_pending = 0
        self.cache = EncodingCache(limits.encoding_cache_bytes)

    async def prepare(self, preparation: Preparation, encoder: TextEncoder, *, cuts_long_texts: bool) -> RequestSpec:
        """Return what a preparation returns. Raises what it raises, and Overloaded.

        `cuts_long_texts`: whether it encodes while it renders; then none that is quicker waits for it.
        """
        limits = self._limits
        if self._num_pending >= limits.tokenize_queue:
            raise Overloaded(
                f"too many requests wait for the tokenizer, at most {limits.tokenize_queue}", retry_after_s=1.0
            )
        work = _Work(preparation, encoder, cuts_long_texts=cuts_long_texts)
        self._num_pending += 1
        with self._lock:
            self._waiting.append(work)
            is_enough = self._num_draining >= limits.tokenize_workers
            self._num_draining += not is_enough
        if not is_enough:
            loop = asyncio.get_running_loop()
            self._pool.start(lambda: self._drain(loop))
        try:
            async with asyncio.timeout(limits.tokenize_limit_s):
                return await work.done
        except TimeoutError as error:
            raise Overloaded(f"tokenizing took longer than {limits.tokenize_limit_s:g} s", retry_after_s=5.0) from error

    def _drain(self, loop: asyncio.AbstractEventLoop) -> None:
        """Prepare what waits, batch after batch, until nothing does; runs in a thread."""
        while batch := self._next_batch():
            try:
                self._prepare(batch, loop)
            except BaseException:
                logger.exception("a batch of prompts failed")
            _call(loop, _deliver, batch)  # those that failed with it
            _call(loop, self._release, len(batch))

    def _next_batch(self) -> list[_Work]:
        with self._lock:
            batch = [self._waiting.popleft() for _ in range(min(_MOST_REQUESTS, len(self._waiting)))]
            self._num_draining -= not batch
        return batch

    def _prepare(self, batch: list[_Work], loop: asyncio.AbstractEventLoop) -> None:
        """Encode short texts together; then, one after the other, what is long, for which no other one waits."""
        cutting = [work for work in batch if work.cuts_long_texts]
        rendered = [work for work in batch if work not in cutting and work.render()]
        long = [work for work in rendered if sum(len(job.text) for job in work.jobs) > PIECE_CHARS]
        for group in _groups([work for work in rendered if work not in long]):
            self._encode_together(group)
        _call(loop, _deliver, [work for work in batch if work not in long and work not in cutting])
        for work in (*long, *cutting):
            if work in long or work.render():
                work.encode(self.cache)
            _call(loop, _deliver, [work])

    def _encode_together(self, group: list[_Work]) -> None:
        """Encode the texts of works with one encoder; alone where a defect of one text would fail all of them."""
        try:
            found = iter(group[0].encoder.encode_batch([job for work in group for job in work.jobs], self.cache))
        except BaseException:  # noqa: BLE001  it is raised again for the text that causes it
            for work in group:
                work.encode(self.cache)
            return
        for work in group:
            work.finish(found)

    def _release(self, count: int) -> None:
        self._num_pending -= count


def _groups(works: list[_Work]) -> Iterator[list[_Work]]:
    """Yield the works with the same encoder, in groups of a bounded number of characters."""
    by_encoder: defaultdict[int, list[_Work]] = defaultdict(list)
    for work in works:
        by_encoder[id(work.encoder)].append(work)
    for same in by_encoder.values():
        group, num_chars = list[_Work](), 0
        for work in same:
            size = sum(len(job.text) for job in work.jobs)
            if group and num_chars + size > _MOST_CHARS:
                yield group
                group, num_chars = [], 0
            group.append(work)
            num_chars += size
        yield group


def _deliver(works: list[_Work]) -> None:
    for work in works:
        work.deliver()


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object) -> None:
    """Call from a thread in the event loop, unless that is closed."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, argument)
