"""From a grammar to what llguidance compiles, and whether it can."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from pagestream_grammars.errors import GrammarError, GrammarRefusedError
from pagestream_grammars.grammar import Grammar, check_structure
from pagestream_grammars.schemas import MAX_ROW_ITEMS
from pagestream_grammars.tokens import TokenTable
from pagestream_grammars.vocabulary import with_token_ids

if TYPE_CHECKING:
    from llguidance import LLParserLimits

_WHITESPACE = r"[ \n\r\t]{0,16}"
"""Between the parts of JSON. Without a bound, a model that repeats itself writes spaces for ever."""
_MOST_VERDICTS = 4096
_MOST_QUOTED = 400
"""Characters of the library's reason; the rest quotes what was given."""


def limits() -> LLParserLimits:
    """Return bounds on the work of compiling, of each mask, and on a matcher's memory.

    They count work and not time, so that what exceeds them does so on any machine.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        max_grammar_size=200_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=MAX_ROW_ITEMS,
        max_lexer_states=20_000,
        verbose_errors=False,
    )


def source(grammar: Grammar, table: TokenTable | None = None) -> str:
    """Return what llguidance compiles.

    Args:
        table: tokens that rules may name, such as <tool_call>; None: special ones alone.

    Raises:
        GrammarError: the rules are malformed, or some place of an output has more than the parser keeps.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    check_structure(grammar)
    if grammar.format == "json":
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": _WHITESPACE})
    if grammar.format == "compact_json":
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides={"whitespace_flexible": False})
    if grammar.format == "choice":  # a terminal is one lexeme, however many texts it has
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    if grammar.format == "grammar":
        try:
            rules = any_to_lark(grammar.text)
        except Exception as error:
            raise refused(grammar, f"it is neither Lark nor GBNF: {error}") from error
        return LLMatcher.grammar_from_lark(rules if table is None else with_token_ids(rules, table))
    return LLMatcher.grammar_from_regex(grammar.text)


def refused(grammar: Grammar, reason: str) -> GrammarError:
    """Return the fault of a grammar that llguidance does not compile."""
    field = "json" if grammar.format == "compact_json" else grammar.format
    return GrammarRefusedError(field, reason.strip()[:_MOST_QUOTED])


class _Verdicts:
    """What was found about grammars, by their content. One thread finds each; others wait for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, GrammarError | None] = OrderedDict()
        self._finding: dict[bytes, threading.Event] = {}

    def of(self, grammar: Grammar) -> GrammarError | None:
        key = blake2b("\0".join(grammar).encode(), digest_size=32).digest()
        while True:
            with self._lock:
                if key in self._found:
                    self._found.move_to_end(key)
                    return self._found[key]
                finding = self._finding.get(key)
                if finding is None:
                    own = self._finding[key] = threading.Event()
                    break
            finding.wait()
        try:
            fault = _find(grammar)
            with self._lock:
                self._found[key] = fault
                if len(self._found) > _MOST_VERDICTS:
                    self._found.popitem(last=False)
            return fault
        finally:
            with self._lock:
                del self._finding[key]
            own.set()


_verdicts = _Verdicts()


def fault(grammar: Grammar) -> GrammarError | None:
    """Return why no engine could hold an output to a grammar; None where one can. No tokenizer is needed.

    CPU work, some milliseconds, up to seconds for the largest schemas; the verdict is kept by the grammar's content.
    """
    return _verdicts.of(grammar)


def _find(grammar: Grammar) -> GrammarError | None:
    from llguidance import LLMatcher

    try:
        text = source(grammar)
    except GrammarError as error:
        return error
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits())
    return refused(grammar, messages[0]) if is_wrong else None
