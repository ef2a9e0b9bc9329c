"""One row's way through its grammar, on the threads of masks; where its reasoning ends and the grammar begins."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum, auto
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from pagestream_engine.errors import RequestFault
from pagestream_engine.features.grammar.compiler import (
    CHEAP_S,
    NOTHING_FORCED,
    WORD_BITS,
    Allowed,
    GrammarCompiler,
    MaskJob,
    the_only_token,
)
from pagestream_engine.plan import Int32Array
from pagestream_engine.sampling_params import Grammar, ReasoningMarks, StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

ALL_ALLOWED = np.int32(-1)


class RowMatcher:
    """Where a sequence's output stands in its grammar: a pure function of the constraint and of the output's tokens.

    Reasoning that may come first is free, and the grammar begins at the token after its end. What may come next is
    found by jobs, which its caller queues and waits for; where the grammar leaves one text, none is needed until its
    end. All else costs microseconds.

    Args:
        end_bits: (words,) int32: the tokens that end the output.
        output_token_ids: what it has generated.
        min_tokens: no end before so many tokens, unless nothing else is allowed.
        ends_late: whether that holds for any number: `ignore_eos`.
        each_s: as for `GrammarWalk`.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        constraint: StructuredOutputsParams,
        end_bits: Int32Array,
        output_token_ids: Sequence[int],
        *,
        min_tokens: int,
        ends_late: bool,
        each_s: float,
    ) -> None:
        self._grammar = grammar = constraint.compiled_from
        self._compiler = compiler
        self._walk = GrammarWalk(compiler, grammar, each_s)
        self._gate = ReasoningGate(constraint.reasoning)
        self._num_tokens = len(output_token_ids)
        self._ahead = list(output_token_ids[_num_before(self._gate, output_token_ids) :])
        """The grammar's tokens that the walk does not have yet."""
        self._allowed = None if self._ahead else compiler.first(grammar)
        """What may come next, in the place where the forced text begins that the output is in."""
        self._num_forced = 0
        """Tokens of that text that the output has."""
        self._job: MaskJob | None = None
        self._found: Allowed | None = None
        """What the job has found."""
        self._end_bits = end_bits
        self._min_tokens = min_tokens
        self._ends_late = ends_late

    @property
    def error(self) -> RequestFault | None:
        """Why there is no next token: a step of the grammar takes too much, or an earlier run's token does not fit."""
        return None if self._allowed is None else self._allowed.error

    def take(self, token_id: int) -> None:
        """Take the next token of the output; the row was ready."""
        self._num_tokens += 1
        if not self._gate.take(token_id):
            return
        self._ahead.append(token_id)
        forced = self._left_of_forced()
        if len(forced) > 1 and token_id == forced[0]:
            self._num_forced += 1
        else:
            self._allowed = None

    def job(self) -> MaskJob | None:
        """Return what is to be queued so that the row becomes ready; None where it is, or the job was returned."""
        if self._allowed is not None or self._job is not None:
            return None
        walk, ahead = self._walk, tuple(self._ahead)

        def work() -> None:
            self._found = walk.advance(ahead)

        self._job = MaskJob(self._grammar, self._expected_s, work)
        return self._job

    def pending(self) -> MaskJob | None:
        """Return the job that the row waits for; None where it is ready: the tokens that may come next are known."""
        if self._allowed is None and self._job is not None and self._job.is_done:
            self._job, self._allowed = None, self._found
            self._num_forced = 0
            self._ahead.clear()
        is_ready = self._allowed is not None or self._gate.phase in (Phase.REASONING, Phase.OPENING)
        return None if is_ready else self._job

    def cancel(self) -> None:
        """The row is gone: a job that has not begun need not be done."""
        if self._job is not None:
            self._job.is_cancelled = True

    def forced(self) -> list[int]:
        """Return the next tokens where the grammar leaves one text; none where it leaves several, or is not reached, or
        the row is not ready."""
        if self._gate.phase is not Phase.GRAMMAR or self.pending() is not None:
            return []
        forced: list[int] = self._left_of_forced().tolist()
        return forced

    def check(self, drafts: Sequence[int]) -> DraftCheck:
        """Return what finds how many leading drafts are allowed next. The row takes no token before that is done."""
        num_before = 0 if self._gate.phase is Phase.GRAMMAR else _num_before(self._gate.ahead(), drafts)
        held = drafts[num_before:]
        forced = self.forced()[: len(held)]
        num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(forced, held, strict=False)))
        if self.error is not None:
            return DraftCheck(0)
        if num_equal == len(held) or num_equal < len(forced):
            return DraftCheck(num_before + num_equal)
        check = DraftCheck(0)
        walk, ahead = self._walk, tuple(self._ahead)
        self._ahead.clear()

        def work() -> None:
            check.num_allowed = num_before + walk.num_allowed(ahead, held)

        check.job = MaskJob(self._grammar, self._expected_s, work)
        return check

    @property
    def allows_all(self) -> bool:
        """Whether any token may come next, so that no mask is needed."""
        return self._gate.phase is Phase.REASONING and not self._puts_end_off

    @property
    def _puts_end_off(self) -> bool:
        return self._ends_late or self._num_tokens < self._min_tokens

    def fill(self, bits: Int32Array) -> None:
        """Write which tokens are allowed next; all where there is an error. The row is ready.

        Args:
            bits: (words,) contiguous: see `TokenMasks.bits`.
        """
        match self._gate.phase:
            case Phase.REASONING:
                bits.fill(ALL_ALLOWED)
            case Phase.OPENING:
                bits.fill(0)
            case Phase.BEGIN | Phase.GRAMMAR:
                self._fill_by_grammar(bits)
        for token_id in self._gate.expected():
            _set(bits, token_id)
        if self._puts_end_off and self.error is None:
            others = bits & ~self._end_bits
            if others.any():
                bits[:] = others

    def _fill_by_grammar(self, bits: Int32Array) -> None:
        if self._allowed is None or self._allowed.error is not None:
            bits.fill(ALL_ALLOWED)
        elif self._num_forced:
            bits.fill(0)
            _set(bits, int(self._allowed.forced[self._num_forced]))
        else:
            bits[:] = self._allowed.bits

    def _left_of_forced(self) -> Int32Array:
        return NOTHING_FORCED if self._allowed is None else self._allowed.forced[self._num_forced :]

    def _expected_s(self) -> float:
        return self._compiler.expected_s(self._grammar)


@dataclass(slots=True, eq=False)
class DraftCheck:
    """How many drafts of a row its grammar allows."""

    num_allowed: int
    job: MaskJob | None = None
    """The job that finds it; None where it is known."""


def _set(bits: Int32Array, token_id: int) -> None:
    bits.view(np.uint32)[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)


def _num_before(gate: ReasoningGate, token_ids: Iterable[int]) -> int:
    """Return how many leading tokens come before the grammar's first one; the gate takes them, and that one."""
    return sum(1 for _ in takewhile(lambda token_id: not gate.take(token_id), token_ids))


_walk_log = logging.getLogger(__name__)

MOST_OVER_S = 10.0
"""CPU seconds that the masks of one output may take beyond what each may take."""
_thread = threading.local()


class GrammarWalk:
    """A matcher, and the tokens that it has. One thread at a time calls it.

    Matchers of one grammar share the states of its lexer, which come to exist as outputs visit them, and count together
    against the limit of these. Where one reaches it, it begins again with states of its own: what others have visited
    is no fault of this output. A grammar that has reached it alone is not tried again for others. Every other limit is
    on the work of one place of one output, and ends it.

    Args:
        each_s: what each mask may take, in CPU seconds; what they take beyond it in sum has the bound `MOST_OVER_S`.
    """

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar, each_s: float) -> None:
        self._compiler = compiler
        self._grammar = grammar
        self._each_s = each_s
        self._token_ids: list[int] = []
        self._matcher: LLMatcher | None = None
        self._is_shared = True
        self._over_s = 0.0

    def advance(self, token_ids: Sequence[int]) -> Allowed:
        """Take the next tokens of the output, and return what may come after them."""
        started = time.thread_time()
        try:
            allowed = self._advance(token_ids)
        except BaseException as failure:  # noqa: BLE001 - a library's panic is this request's end alone
            _walk_log.exception("a mask could not be computed")
            return self._ended(f"{type(failure).__name__}: {failure}")
        taken_s = time.thread_time() - started
        self._compiler.note_cost(self._grammar, taken_s)
        self._over_s += max(0.0, taken_s - self._each_s)
        if self._over_s > MOST_OVER_S:
            limits = f"{MOST_OVER_S:g} s more than the {1e3 * self._each_s:g} ms that each has"
            return self._ended(f"its masks took {limits}; simplify it")
        return allowed

    def num_allowed(self, token_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """Take the next tokens of the output, and return how many leading drafts are allowed after them; none where
        that can't be said. The walk stays in its place."""
        try:
            self._token_ids += token_ids
            matcher = self._own_matcher(token_ids)
            return 0 if matcher.is_error() else int(matcher.deep_copy().validate_tokens(list(drafts)))
        except BaseException:  # noqa: BLE001 - a draft is no more than a guess
            _walk_log.exception("drafts could not be checked")
            return 0

    def _advance(self, token_ids: Sequence[int]) -> Allowed:
        self._token_ids += token_ids
        matcher = self._own_matcher(token_ids)
        bits = self._compiler.compute(matcher)
        if self._is_shared and _has_too_many_states(matcher) and not self._compiler.is_heavy(self._grammar):
            self._is_shared = False
            matcher = self._matcher = self._compiler.unshared_matcher(self._grammar)
            self._consume(matcher, self._token_ids)
            bits = self._compiler.compute(matcher)
            if matcher.is_error():
                self._compiler.note_heavy(self._grammar)
        if matcher.is_error():
            return self._ended(matcher.get_error().strip()[:400])
        if not bits.any():
            return self._ended("it goes on behind a token that ends an output")
        return Allowed(bits, self._forced(matcher, bits))

    def _own_matcher(self, token_ids: Sequence[int]) -> LLMatcher:
        """Return the matcher once it has the next tokens, which `_token_ids` ends with."""
        if self._matcher is None:
            self._matcher = self._compiler.matcher(self._grammar)
            token_ids = self._token_ids
        self._consume(self._matcher, token_ids)
        return self._matcher

    def _consume(self, matcher: LLMatcher, token_ids: Sequence[int]) -> None:
        """Let a matcher take tokens. One whose masks take long may take as long for a token: without the GIL then."""
        if self._compiler.expected_s(self._grammar) <= CHEAP_S:
            matcher.consume_tokens(list(token_ids))
            return
        executor = _executor()
        for token_id in token_ids:
            executor.consume_token_par([(matcher, token_id)])

    def _forced(self, matcher: LLMatcher, bits: Int32Array) -> Int32Array:
        """Return the tokens of the one text that may come next. The library allows the tokens that its tokenizer writes
        this text with, and no others; so they are found once, and need no masks.

        Finding them takes as long as a mask, and holds the GIL: it is done once for all outputs in the same place.
        """
        if the_only_token(bits) is None:
            return NOTHING_FORCED
        return self._compiler.forced(matcher, self._grammar, self._token_ids[-1:])

    def _ended(self, reason: str) -> Allowed:
        count = len(self._token_ids)
        fault = RequestFault(f"structured_outputs: the output can't go on after {count} tokens: {reason}")
        return Allowed(NOTHING_FORCED, NOTHING_FORCED, fault)


def _has_too_many_states(matcher: LLMatcher) -> bool:
    """Whether a matcher has stopped at the limit that all of its grammar share. The library's reasons don't say so, but
    its text: other limits are the parser's."""
    return matcher.is_error() and matcher.get_error().lower().startswith("lexer error")


def _executor() -> LLExecutor:
    """Return this thread's own: one that is shared does one job at a time."""
    executor: LLExecutor | None = getattr(_thread, "executor", None)
    if executor is None:
        from llguidance import LLExecutor

        executor = _thread.executor = LLExecutor(num_threads=1)
    return executor


class Phase(Enum):
    """What the next token belongs to."""

    BEGIN = auto()
    """The first token of an opening, or the grammar's first one."""
    OPENING = auto()
    """The rest of an opening: its first token has decided that there is reasoning."""
    REASONING = auto()
    """Reasoning, or the marks at its end."""
    GRAMMAR = auto()
    """The grammar; it stays so."""


class ReasoningGate:
    """A pure function of the marks and of an output's tokens. A token at a time, so that drafts can cross the end.

    Args:
        marks: of reasoning that may come first; None: the grammar holds from the first token.
    """

    def __init__(self, marks: ReasoningMarks | None) -> None:
        self._openings = () if marks is None else marks.openings
        self._end = () if marks is None else marks.end
        self._latest: deque[int] = deque(maxlen=len(self._end))
        """The last tokens of the reasoning."""
        self.phase = Phase.GRAMMAR if marks is None else Phase.BEGIN if marks.openings else Phase.REASONING

    def take(self, token_id: int) -> bool:
        """Take the output's next token; return whether it is the grammar's."""
        match self.phase:
            case Phase.GRAMMAR:
                return True
            case Phase.REASONING:
                self._latest.append(token_id)
                if tuple(self._latest) == self._end:
                    self.phase = Phase.GRAMMAR
                return False
        is_opening = self._narrow(token_id)
        if not is_opening:
            self.phase = Phase.GRAMMAR
        return not is_opening

    def expected(self) -> list[int]:
        """Return the tokens that an opening may have next; none outside of `BEGIN` and `OPENING`."""
        return sorted({opening[0] for opening in self._openings})

    def ahead(self) -> ReasoningGate:
        """Return a copy, to look ahead with."""
        return deepcopy(self)

    def _narrow(self, token_id: int) -> bool:
        """Keep the rest of the openings that go on with a token; return whether there are any."""
        self._openings = tuple(opening[1:] for opening in self._openings if opening[0] == token_id)
        if not self._openings:
            return False
        self.phase = Phase.OPENING
        if not all(self._openings):
            self._openings = ()
            self.phase = Phase.REASONING
        return True
