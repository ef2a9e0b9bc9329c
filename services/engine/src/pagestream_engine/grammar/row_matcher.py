"""One sequence in its grammar, as the step's thread sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from pagestream_engine.errors import RequestFault
from pagestream_engine.grammar.allowed import NOTHING_FORCED, WORD_BITS, Allowed
from pagestream_engine.grammar.compiler import GrammarCompiler
from pagestream_engine.grammar.mask_threads import MaskJob
from pagestream_engine.grammar.reasoning_gate import Phase, ReasoningGate
from pagestream_engine.grammar.walk import GrammarWalk
from pagestream_engine.plan import Int32Array
from pagestream_engine.sampling_params import StructuredOutputsParams

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
    """That finds it; None where it is known."""


def _set(bits: Int32Array, token_id: int) -> None:
    bits.view(np.uint32)[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)


def _num_before(gate: ReasoningGate, token_ids: Iterable[int]) -> int:
    """Return how many leading tokens come before the grammar's first one; the gate takes them, and that one."""
    return sum(1 for _ in takewhile(lambda token_id: not gate.take(token_id), token_ids))
