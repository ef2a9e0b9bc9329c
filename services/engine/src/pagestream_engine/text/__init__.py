"""Tokens to text: incremental detokenization and stop strings."""

from pagestream_engine.text.bad_words import bad_words_token_ids
from pagestream_engine.text.detokenizer import IncrementalDetokenizer, Pieces
from pagestream_engine.text.stop_strings import StopStringMatcher

__all__ = [
    "IncrementalDetokenizer",
    "Pieces",
    "StopStringMatcher",
    "bad_words_token_ids",
]
