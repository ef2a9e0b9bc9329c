"""The matcher of one sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pagestream_engine.errors import RequestFault
from pagestream_engine.grammar.compiler import GrammarCompiler
from pagestream_engine.request.grammars import Grammar
from pagestream_engine.step.records import Int32Array

WORD_BITS = 32
ALL_ALLOWED = np.int32(-1)


class RowMatcher:
    """Where a sequence's output stands in its grammar: a pure function of the grammar and of the output's tokens.

    Matchers of one grammar share the states of its lexer, which come to exist as outputs visit them, and count together
    against the limits. Where one reaches a limit, it begins again with states of its own: what others have visited is
    no fault of this output.

    Args:
        compiler: makes matchers.
        grammar: of the output.
        end_bits: (words,) int32: the tokens that end the output.
        output_token_ids: what it has generated.
        min_tokens: no end before so many tokens, unless nothing else is allowed.
        ends_late: whether that holds for any number: `ignore_eos`.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        grammar: Grammar,
        end_bits: Int32Array,
        output_token_ids: Iterable[int],
        *,
        min_tokens: int,
        ends_late: bool,
    ) -> None:
        self._compiler = compiler
        self._grammar = grammar
        self._token_ids = list(output_token_ids)
        self._matcher = compiler.matcher(grammar)
        self._is_shared = True
        self._matcher.consume_tokens(self._token_ids)
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
        self._matcher.consume_token(token_id)

    def forced(self) -> list[int]:
        """Return the next tokens where the grammar leaves one text, as the tokenizer writes it; none where it leaves
        several. Other tokens of the same text are allowed too: these are no more than likely."""
        return self._matcher.compute_ff_tokens() if self._may_look_ahead else []

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens the grammar allows next; too few of them where it reaches a limit."""
        return self._matcher.validate_tokens(list(token_ids)) if self._may_look_ahead else len(token_ids)

    @property
    def _may_look_ahead(self) -> bool:
        """Whether a limit that is reached by looking ahead is no end: `fill` begins again alone."""
        return self._is_shared and not self._matcher.is_error()

    def fill(self, bits: Int32Array) -> None:
        """Write which tokens are allowed next; all where there is an error.

        Args:
            bits: (words,) contiguous: see `TokenMasks.bits`.
        """
        if not self._compute(bits) and self._is_shared:
            self._is_shared = False
            self._matcher = self._compiler.unshared_matcher(self._grammar)
            self._matcher.consume_tokens(self._token_ids)
            self._compute(bits)
        if self._matcher.is_error():
            bits.fill(ALL_ALLOWED)
        elif self._ends_late or len(self._token_ids) < self._min_tokens:
            others = bits & ~self._end_bits
            if others.any():
                bits[:] = others

    def _compute(self, bits: Int32Array) -> bool:
        """Return whether it could be done."""
        bits.fill(0)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return not self._matcher.is_error()


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Int32Array:
    """Return (words,) with the bits of some tokens of the vocabulary set."""
    is_set = np.zeros(-(-vocab_size // WORD_BITS) * WORD_BITS, np.bool_)
    is_set[[token_id for token_id in token_ids if token_id < vocab_size]] = True
    return np.packbits(is_set, bitorder="little").view(np.int32)
