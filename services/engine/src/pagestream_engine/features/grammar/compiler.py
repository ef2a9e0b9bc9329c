"""Grammars compiled and kept, what may come next in one, and the threads that walk through them beside the steps.

llguidance bounds the work of one mask, which may still be most of a second; nothing bounds the sum over a step's rows.
So no step computes a mask: it waits for them under a deadline, and a row whose mask isn't there has no token in it.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pagestream_grammars import (
    Grammar,
    GrammarError,
    TokenTable,
    grammar_tokenizer,
    limits,
    num_states_for_divisors,
    refused,
    source,
)

from pagestream_engine.errors import InvariantViolation, RequestFault
from pagestream_engine.models.tokenizer import load_tokenizer
from pagestream_engine.plan import Int32Array, PreparedGrammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = logging.getLogger(__name__)

NUM_THREADS = 2
"""One grammar that takes long holds up others only where there are two."""
_CLOSE_LIMIT_S = 5.0
"""Wait for each thread's end."""
CACHE_BYTES = 256 << 20
_BYTES_OF_EACH, _BYTES_OF_A_BYTE = 1 << 20, 32
"""Memory of a compiled grammar with the states of its lexer, and of each byte of its text: rounded up from
docs/benchmarks/structured-output.md."""
_BYTES_OF_A_STATE = 512
"""For each remainder of a schema's `multipleOf`: 400 to 460 were measured of 9,973, 28,363 and 29,913."""
_MOST_FORCED_TOKENS = 1 << 20
"""Of all texts that are kept because a grammar leaves no other one."""
_MOST_HEAVY = 1024
"""Grammars that are known to reach a limit by themselves."""
_UNKNOWN_S = 1.0
"""What a mask of a grammar may take that is compiled first."""
_COST_FALLS_BY = 0.9
"""With each mask: a grammar that was expensive once becomes cheap again."""
Reply = Callable[[PreparedGrammar], None]


@dataclass(slots=True, eq=False)
class CompiledGrammar:
    """A grammar that can be walked through."""

    matcher: LLMatcher
    """At the beginning of an output. Copies share its lexer."""
    first: Allowed
    """What an output may begin with."""
    cost_s: float
    """CPU seconds that a mask of it may take, by what the latest ones have taken."""


class GrammarCompiler:
    """From the text of a grammar to matchers for sequences, and to the masks that need none.

    Thread-safe.

    Nothing is loaded before the first grammar: the tokenizer's tokens are laid out then, on the thread that compiles.

    Args:
        folder: of the model, with its tokenizer.json.
        eos_token_ids: tokens that end an output where its grammar is complete.
        cache_bytes: most memory of the compiled grammars that are kept, by an estimate.
    """

    def __init__(
        self, folder: Path, vocab_size: int, eos_token_ids: Collection[int], cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._folder = folder
        self.vocab_size = vocab_size
        self.masks = MaskThreads(max(2, min(4, (os.cpu_count() or 2) // 2)))
        """Where sequences walk through their grammars."""
        self._eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._end_bits = bits_of(self._eos_token_ids, vocab_size)
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self._forced: OrderedDict[tuple[Grammar, tuple[int, ...], bytes], Int32Array] = OrderedDict()
        """Tokens by the grammar, the token before them and their text, the latest used ones last."""
        self._num_forced = 0
        self._heavy: OrderedDict[Grammar, None] = OrderedDict()
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._tokenizer: tuple[LLTokenizer, TokenTable] | None = None
        self._wanted: queue.SimpleQueue[tuple[Grammar, Reply] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def prepare(self, grammar: Grammar, reply: Reply) -> None:
        """Compile a grammar, unless it is there.

        Args:
            grammar: what its request has asked for.
            reply: called with what came of it: here where it is there, else on another thread.

        Raises:
            InvariantViolation: it is closed.
        """
        if self._is_closed:
            raise InvariantViolation("a grammar is to be compiled after the end")
        if self._is_known(grammar):
            reply(PreparedGrammar(grammar, None))
            return
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run, name="grammars", daemon=True) for _ in range(NUM_THREADS)
            ]
            atexit.register(self.close)
            for thread in self._threads:
                thread.start()
        self._wanted.put((grammar, reply))

    def close(self) -> None:
        """End the threads, and drop what waits for them. A grammar that takes long ends its thread when it is done."""
        self._is_closed = True
        atexit.unregister(self.close)
        for _ in self._threads:
            self._wanted.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_LIMIT_S)
        self._threads = []
        self.masks.close()

    def first(self, grammar: Grammar) -> Allowed | None:
        """Return what an output may begin with; None where the grammar was evicted since `prepare`."""
        compiled = self._kept(grammar)
        return None if compiled is None else compiled.first

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher for a new sequence, at the beginning of its output. One that was evicted since `prepare` is
        compiled again, here: no thread of steps calls this.

        Raises:
            InvariantViolation: it can't be compiled, although it could before.
        """
        compiled = self._kept(grammar)
        if compiled is None:
            compiled = self._compiled_before(grammar)
            self._keep(grammar, compiled)
        return compiled.matcher.deep_copy()

    def unshared_matcher(self, grammar: Grammar) -> LLMatcher:
        """Return one that shares no states with others, at the beginning of an output; the shared states are dropped,
        for the sequences that come. No thread of steps calls this.

        Raises:
            InvariantViolation: it can't be compiled, although it could before.
        """
        with self._lock:
            if self._cache.pop(grammar, None) is not None:
                self._num_bytes -= _estimated_bytes(grammar)
        return self._compiled_before(grammar).matcher

    def expected_s(self, grammar: Grammar) -> float:
        """Return the CPU seconds that a mask of a grammar may take."""
        with self._lock:
            compiled = self._cache.get(grammar)
        return _UNKNOWN_S if compiled is None else compiled.cost_s

    def note_cost(self, grammar: Grammar, seconds: float) -> None:
        """Note the CPU seconds that a mask has taken."""
        with self._lock:
            if (compiled := self._cache.get(grammar)) is not None:
                compiled.cost_s = max(seconds, _COST_FALLS_BY * compiled.cost_s)

    def is_heavy(self, grammar: Grammar) -> bool:
        """Whether an output has reached a limit of a grammar with states of its own."""
        with self._lock:
            return grammar in self._heavy

    def note_heavy(self, grammar: Grammar) -> None:
        """Note that one has."""
        with self._lock:
            self._heavy[grammar] = None
            if len(self._heavy) > _MOST_HEAVY:
                self._heavy.popitem(last=False)

    def compute(self, matcher: LLMatcher) -> Int32Array:
        """Return (words,) the mask of what may come next; nothing where there is an error, or where the grammar goes on
        by an end token alone.

        A grammar may name an end token before its own end. An output would end there with half of what it is to match.
        """
        bits = np.zeros(num_words(self.vocab_size), np.int32)
        if matcher.is_error():
            return bits
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if (bits & self._end_bits).any() and not matcher.is_error() and not matcher.is_accepting():
            for token_id in self._eos_token_ids:
                ended = matcher.deep_copy()
                if not (ended.consume_token(token_id) and ended.is_accepting()):
                    bits[token_id // WORD_BITS] &= ~bits_of([token_id], self.vocab_size)[token_id // WORD_BITS]
        return bits

    def forced(self, matcher: LLMatcher, grammar: Grammar, last: Sequence[int]) -> Int32Array:
        """Return the tokens of the only text that a matcher allows next, found once for all matchers in its place.

        Args:
            matcher: after a mask that allows one token.
            last: the token before.
        """
        key = grammar, tuple(last), matcher.compute_ff_bytes()
        with self._lock:
            if (known := self._forced.get(key)) is not None:
                self._forced.move_to_end(key)
                return known
        found = np.array(list(takewhile(self._goes_on, matcher.compute_ff_tokens())), np.int32)
        with self._lock:
            if key not in self._forced:
                self._num_forced += len(found)
            self._forced[key] = found
            while self._num_forced > _MOST_FORCED_TOKENS and len(self._forced) > 1:
                _, evicted = self._forced.popitem(last=False)
                self._num_forced -= len(evicted)
        return found

    def _goes_on(self, token_id: int) -> bool:
        return token_id not in self._eos_token_ids

    def _kept(self, grammar: Grammar) -> CompiledGrammar | None:
        with self._lock:
            compiled = self._cache.get(grammar)
            if compiled is not None:
                self._cache.move_to_end(grammar)
            return compiled

    def _compiled_before(self, grammar: Grammar) -> CompiledGrammar:
        found = self._compile(grammar)
        if isinstance(found, RequestFault):
            raise InvariantViolation(found)
        return found

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None and not self._is_closed:
            grammar, reply = wanted
            error: RequestFault | None = None
            if not self._is_known(grammar):
                try:
                    found = self._compile(grammar)
                    if not isinstance(found, RequestFault):
                        self._keep(grammar, found)
                except BaseException as failure:  # noqa: BLE001 - a library's panic is this request's end alone
                    _log.exception("a grammar could not be compiled")
                    error = RequestFault(f"structured_outputs: {type(failure).__name__}: {failure}")
                else:
                    error = found if isinstance(found, RequestFault) else None
            reply(PreparedGrammar(grammar, error))

    def _is_known(self, grammar: Grammar) -> bool:
        with self._lock:
            return grammar in self._cache

    def _compile(self, grammar: Grammar) -> CompiledGrammar | RequestFault:
        """Compile a grammar, or return what is wrong with it."""
        from llguidance import LLMatcher

        tokens = self._tokens()
        if isinstance(tokens, RequestFault):
            return tokens
        try:
            matcher = LLMatcher(tokens[0], source(grammar, tokens[1]), log_level=0, limits=limits())
        except GrammarError as fault:
            return RequestFault(f"structured_outputs: {fault}")
        started = time.thread_time()
        bits = self.compute(matcher)  # Sequences begin with what this finds out.
        if not matcher.is_error() and not bits.any():
            return RequestFault(f"structured_outputs: {refused(grammar, 'nothing matches it')}")
        if matcher.is_error():
            return RequestFault(f"structured_outputs: {refused(grammar, matcher.get_error())}")
        cost_s = time.thread_time() - started
        forced = NOTHING_FORCED if the_only_token(bits) is None else self.forced(matcher, grammar, ())
        return CompiledGrammar(matcher, Allowed(bits, forced), cost_s)

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        with self._lock:
            if grammar not in self._cache:
                self._num_bytes += _estimated_bytes(grammar)
            self._cache[grammar] = compiled
            while self._num_bytes > self._cache_bytes and len(self._cache) > 1:
                evicted, _ = self._cache.popitem(last=False)
                self._num_bytes -= _estimated_bytes(evicted)

    def _tokens(self) -> tuple[LLTokenizer, TokenTable] | RequestFault:
        with self._loading:
            if self._tokenizer is None:
                tokenizer = load_tokenizer(self._folder)
                if tokenizer is None:
                    return RequestFault("structured_outputs: the model has no tokenizer.json")
                table = TokenTable(tokenizer)
                try:
                    self._tokenizer = (
                        grammar_tokenizer(tokenizer, self.vocab_size, self._eos_token_ids, table),
                        table,
                    )
                except ValueError as error:
                    return RequestFault(f"structured_outputs: the model's tokenizer has no grammars: {error}")
            return self._tokenizer


def _estimated_bytes(grammar: Grammar) -> int:
    states = num_states_for_divisors(grammar)
    return _BYTES_OF_EACH + _BYTES_OF_A_BYTE * len(grammar.text) + _BYTES_OF_A_STATE * states


_THREADS_CLOSE_LIMIT_S = 5.0
"""Wait for each thread's end."""
CHEAP_S = 0.002
"""Of a mask: grammars up to it are served first, several jobs in a turn."""
_LONG_S = 0.05
"""Of a mask: grammars above it are served last, and never by the first thread."""
_MOST_AT_ONCE = 8
"""Cheap jobs of a grammar that a thread does in one turn."""


class MaskJob:
    """One piece of work on a row's walk.

    Args:
        grammar: jobs of equal ones run one after the other. Their matchers share a lexer, and its lock.
        expected_s: returns what it may take, asked when it is queued.
        work: run once on a thread; must not raise.
    """

    __slots__ = ("expected_s", "grammar", "is_cancelled", "is_done", "latch", "work")

    def __init__(self, grammar: Hashable, expected_s: Callable[[], float], work: Callable[[], None]) -> None:
        self.grammar = grammar
        self.expected_s = expected_s
        self.work = work
        self.is_done = False
        self.is_cancelled = False
        """Nobody wants it any more: it is not run if it has not begun."""
        self.latch: _Latch | None = None


class _Latch:
    """How many jobs somebody waits for."""

    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count


class MaskThreads:
    """Runs jobs: those of cheap grammars first, those of one grammar in their order, grammars of a kind in turns.

    The first thread runs no grammar whose masks take long, so that these hold up others of their kind alone. Started
    with the first job. One thread submits and waits.

    Args:
        num_threads: at least 2.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._queues: tuple[OrderedDict[Hashable, deque[MaskJob]], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        """Grammars that are cheap, others, and those that take long; each by whose turn it is."""
        self._busy: dict[Hashable, deque[MaskJob]] = {}
        """Grammars that a thread works on, and what waits for that."""
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, jobs: Sequence[MaskJob]) -> None:
        """Queue jobs. After `close` they are never done."""
        if not jobs:
            return
        if not self._threads and not self._is_closed:
            self._threads = [
                threading.Thread(target=self._run, args=(2 if place == 0 else 3,), name="masks", daemon=True)
                for place in range(self._num_threads)
            ]
            atexit.register(self.close)  # a thread in the library must not outlive the interpreter
            for thread in self._threads:
                thread.start()
        with self._lock:
            for job in jobs:
                self._queue_of(job).append(job)
            self._wake.notify_all()

    def wait(self, jobs: Sequence[MaskJob], timeout_s: float, *, for_any: bool = False) -> None:
        """Wait until all of some jobs are done, or any of them, or the time is over."""
        with self._lock:
            pending = [job for job in jobs if not job.is_done]
            if not pending or (for_any and len(pending) < len(jobs)):
                return
            latch = _Latch(1 if for_any else len(pending))
            for job in pending:
                job.latch = latch
            self._done.wait_for(lambda: latch.count <= 0 or self._is_closed, timeout_s)
            for job in pending:
                job.latch = None

    def close(self) -> None:
        """End the threads, and drop what waits for them. A job that takes long ends its thread when it is done."""
        with self._lock:
            self._is_closed = True
            self._wake.notify_all()
            self._done.notify_all()
        atexit.unregister(self.close)
        for thread in self._threads:
            thread.join(_THREADS_CLOSE_LIMIT_S)
        self._threads = []

    def _queue_of(self, job: MaskJob) -> deque[MaskJob]:
        key = job.grammar
        for queues in (self._busy, *self._queues):
            if key in queues:
                return queues[key]
        queue: deque[MaskJob] = deque()
        self._queues_for(job)[key] = queue
        return queue

    def _queues_for(self, job: MaskJob) -> OrderedDict[Hashable, deque[MaskJob]]:
        expected_s = job.expected_s()
        return self._queues[(expected_s > CHEAP_S) + (expected_s > _LONG_S)]

    def _run(self, num_kinds: int) -> None:
        """Run jobs of so many kinds."""
        mine = self._queues[:num_kinds]
        while True:
            with self._lock:
                self._wake.wait_for(lambda: self._is_closed or any(mine))
                if self._is_closed:
                    return
                key, jobs = self._take(next(queues for queues in mine if queues))
            for job in jobs:
                if not job.is_cancelled:
                    job.work()
            with self._lock:
                self._finish(key, jobs)

    def _take(self, queues: OrderedDict[Hashable, deque[MaskJob]]) -> tuple[Hashable, list[MaskJob]]:
        """Take the jobs of the grammar whose turn it is."""
        key, queue = queues.popitem(last=False)
        most = _MOST_AT_ONCE if queues is self._queues[0] else 1
        jobs = [queue.popleft() for _ in range(min(most, len(queue)))]
        self._busy[key] = queue
        return key, jobs

    def _finish(self, key: Hashable, jobs: Sequence[MaskJob]) -> None:
        waits = self._busy.pop(key)
        while waits and waits[0].is_cancelled:
            waits.popleft().is_done = True
        if waits:
            self._queues_for(waits[0])[key] = waits
            self._wake.notify_all()
        for job in jobs:
            job.is_done = True
            if job.latch is not None:
                job.latch.count -= 1
                if job.latch.count == 0:
                    self._done.notify_all()


WORD_BITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """The tokens that a grammar allows in one place of an output."""

    bits: Int32Array
    """(words,): token i is allowed if bit i % 32 of word i // 32 is set. Not to be written."""
    forced: Int32Array
    """(tokens,): where one token alone is allowed, that one and those after it for as long as this holds; else none."""
    error: RequestFault | None = None
    """Why there is no next token; the bits mean nothing."""


NOTHING_FORCED: Int32Array = np.empty(0, np.int32)


def num_words(vocab_size: int) -> int:
    """Return how many words a mask of a vocabulary has."""
    return -(-vocab_size // WORD_BITS)


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Int32Array:
    """Return (words,) with the bits of some tokens of the vocabulary set."""
    is_set = np.zeros(num_words(vocab_size) * WORD_BITS, np.bool_)
    is_set[[token_id for token_id in token_ids if token_id < vocab_size]] = True
    return np.packbits(is_set, bitorder="little").view(np.int32)


def the_only_token(bits: Int32Array) -> int | None:
    """Return the token of a mask that allows one alone."""
    (words,) = bits.nonzero()
    if len(words) != 1:
        return None
    word = int(bits[words[0]]) & 0xFFFFFFFF
    if word & (word - 1):
        return None
    return int(words[0]) * WORD_BITS + word.bit_length() - 1
