"""The matcher of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np

from pagestream_engine.errors import RequestFault
from pagestream_engine.grammar.compiler import GrammarCompiler
from pagestream_engine.grammar.reasoning_gate import Phase, ReasoningGate
from pagestream_engine.request.structured_outputs import StructuredOutputsParams
from pagestream_engine.step.records import Int32Array

WORD_BITS = 32
ALL_ALLOWED = np.int32(-1)


class RowMatcher:
    """Where a sequence's output stands in its grammar: a pure function of the constraint and of the output's tokens.

    Reasoning that may come first is free, and the grammar begins at the token after its end.

    Matchers of one grammar share the states of its lexer, which come to exist as outputs visit them, and count together
    against the limits. Where one reaches a limit, it begins again with states of its own: what others have visited is
    no fault of this output.

    Args:
        end_bits: (words,) int32: the tokens that end the output.
        output_token_ids: what it has generated.
        min_tokens: no end before so many tokens, unless nothing else is allowed.
        ends_late: whether that holds for any number: `ignore_eos`.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        constraint: StructuredOutputsParams,
        end_bits: Int32Array,
        output_token_ids: Iterable[int],
        *,
        min_tokens: int,
        ends_late: bool,
    ) -> None:
        self._compiler = compiler
        self._grammar = constraint.compiled_from
        self._token_ids = list(output_token_ids)
        self._gate = ReasoningGate(constraint.reasoning)
        self._num_before = _num_before(self._gate, self._token_ids)
        """Tokens before the grammar's first one."""
        self._matcher = compiler.matcher(self._grammar)
        self._is_shared = True
        self._matcher.consume_tokens(self._token_ids[self._num_before :])
        self._end_bits = end_bits
        self._min_tokens = min_tokens
        self._ends_late = ends_late

    @property
    def error(self) -> RequestFault | None:
        """Why there is no next token: a step of the grammar takes too much, or an earlier run's token does not fit."""
        if not self._matcher.is_error():
            return None
        reason, count = self._matcher.get_error().strip()[:400], len(self._token_ids)
        return RequestFault(f"structured_outputs: the output can't go on after {count} tokens: {reason}")

    def take(self, token_id: int) -> None:
        """Take the next token of the output."""
        self._token_ids.append(token_id)
        if self._gate.take(token_id):
            self._matcher.consume_token(token_id)
        else:
            self._num_before += 1

    def forced(self) -> list[int]:
        """Return the next tokens where the grammar leaves one text, as the tokenizer writes it; none where it leaves
        several, or is not reached. Other tokens of the same text are allowed too: these are no more than likely."""
        is_held = self._gate.phase is Phase.GRAMMAR and self._may_look_ahead
        return self._matcher.compute_ff_tokens() if is_held else []

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens are allowed next; too few of them where the grammar reaches a limit."""
        num_before = 0 if self._gate.phase is Phase.GRAMMAR else _num_before(self._gate.ahead(), token_ids)
        if not self._may_look_ahead or num_before == len(token_ids):
            return len(token_ids)
        return num_before + self._matcher.validate_tokens(list(token_ids[num_before:]))

    @property
    def _may_look_ahead(self) -> bool:
        """Whether a limit that is reached by looking ahead is no end: `fill` begins again alone."""
        return self._is_shared and not self._matcher.is_error()

    @property
    def allows_all(self) -> bool:
        """Whether any token may come next, so that no mask is needed."""
        return self._gate.phase is Phase.REASONING and not self._puts_end_off

    @property
    def _puts_end_off(self) -> bool:
        return self._ends_late or len(self._token_ids) < self._min_tokens

    def fill(self, bits: Int32Array) -> None:
        """Write which tokens are allowed next; all where there is an error.

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
            bits.view(np.uint32)[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
        if self._puts_end_off and not self._matcher.is_error():
            others = bits & ~self._end_bits
            if others.any():
                bits[:] = others

    def _fill_by_grammar(self, bits: Int32Array) -> None:
        if not self._compute(bits) and self._is_shared:
            self._is_shared = False
            self._matcher = self._compiler.unshared_matcher(self._grammar)
            self._matcher.consume_tokens(self._token_ids[self._num_before :])
            self._compute(bits)
        if self._matcher.is_error():
            bits.fill(ALL_ALLOWED)

    def _compute(self, bits: Int32Array) -> bool:
        """Return whether it could be done."""
        bits.fill(0)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return not self._matcher.is_error()


def _num_before(gate: ReasoningGate, token_ids: Iterable[int]) -> int:
    """Return how many leading tokens come before the grammar's first one; the gate takes them, and that one."""
    return sum(1 for _ in takewhile(lambda token_id: not gate.take(token_id), token_ids))


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Int32Array:
    """Return (words,) with the bits of some tokens of the vocabulary set."""
    is_set = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, np.bool_)
    is_set[[token_id for token_id in token_ids if token_id < vocab_size]] = True
    return np.packbits(is_set, bitorder="little").view(np.int32)
