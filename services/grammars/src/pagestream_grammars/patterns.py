"""Objects whose further names come from patterns that leave none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_PAIRS = 256
"""Of patterns and listed names: some 10 ms of CPU. Schemas with more are left as they are."""


def without_spent_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without `patternProperties`, where no name that isn't listed can match any of them.

    llguidance would allow a comma before such a name, after which nothing can come. What the patterns ask of listed
    names goes to these.
    """
    patterns, listed = schema.get("patternProperties"), schema.get("properties")
    if schema.get("additionalProperties") is not False or not isinstance(patterns, dict) or not patterns:
        return schema
    if not isinstance(listed, dict) or not 0 < len(patterns) * len(listed) <= _MOST_PAIRS:
        return schema
    if _leave_names(tuple(patterns), tuple(listed)):
        return schema
    properties = {
        name: {"allOf": [value, *found]}
        if (found := [patterns[each] for each in patterns if _matches(each, name)])
        else value
        for name, value in listed.items()
    }
    return {**{key: value for key, value in schema.items() if key != "patternProperties"}, "properties": properties}


@lru_cache(maxsize=1024)
def _leave_names(patterns: Sequence[str], listed: Sequence[str]) -> bool:
    """Whether some name that isn't listed matches one of some patterns; True where that can't be said."""
    properties = {name: {"const": 0} for name in listed}
    matcher = _matcher(patterns, {"properties": properties, "required": list(listed)})
    begin = "{" + ",".join(f"{_spelled(name)}:0" for name in listed) + ","
    # Where a pattern has some name, the quote before it may come.
    return not _takes(matcher, begin) or _takes(matcher, '"')


@lru_cache(maxsize=4096)
def _matches(pattern: str, name: str) -> bool:
    return _takes(_matcher([pattern], {}), f"{{{_spelled(name)}:")


def _matcher(patterns: Sequence[str], fields: dict[str, Any]) -> LLMatcher:
    from llguidance import LLMatcher

    schema = {"type": "object", **fields, "patternProperties": {each: {"const": 0} for each in patterns}}
    text = json.dumps({**schema, "additionalProperties": False})
    grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    return LLMatcher(_bytes(), grammar, log_level=0)


def _takes(matcher: LLMatcher, text: str) -> bool:
    given = list(text.encode())
    return not matcher.is_error() and matcher.try_consume_tokens(given) == len(given)


def _spelled(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    """Return a tokenizer whose tokens are the bytes, by their numbers."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
