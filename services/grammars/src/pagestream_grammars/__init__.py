"""What an output must match: the same limits, compiler and table of tokens for gateway and engine."""

from pagestream_grammars.compiling import fault, limits, refused, source
from pagestream_grammars.errors import GrammarError
from pagestream_grammars.grammar import (
    ANY_OBJECT,
    MAX_BYTES,
    MAX_CHOICES,
    MAX_NESTING,
    MAX_SCHEMA_BYTES,
    Grammar,
    choice_grammar,
    json_grammar,
    num_states_for_divisors,
    regex_grammar,
    rules_grammar,
)
from pagestream_grammars.schemas import stripped
from pagestream_grammars.tokens import TokenTable
from pagestream_grammars.vocabulary import grammar_tokenizer

__all__ = [
    "ANY_OBJECT",
    "MAX_BYTES",
    "MAX_CHOICES",
    "MAX_NESTING",
    "MAX_SCHEMA_BYTES",
    "Grammar",
    "GrammarError",
    "TokenTable",
    "choice_grammar",
    "fault",
    "grammar_tokenizer",
    "json_grammar",
    "limits",
    "num_states_for_divisors",
    "refused",
    "regex_grammar",
    "rules_grammar",
    "source",
    "stripped",
]
