"""The way of one output through its grammar, on the threads of masks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagestream_engine.errors import RequestFault
from pagestream_engine.grammar.allowed import NOTHING_FORCED, Allowed, the_only_token
from pagestream_engine.grammar.compiler import GrammarCompiler
from pagestream_engine.grammar.mask_threads import CHEAP_S
from pagestream_engine.plan import Int32Array
from pagestream_engine.sampling_params import Grammar

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_log = logging.getLogger(__name__)

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
            _log.exception("a mask could not be computed")
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
            _log.exception("drafts could not be checked")
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
