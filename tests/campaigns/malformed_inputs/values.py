"""Values that no field wants, and damage to bytes."""

import json
from random import Random
from typing import Any

_MARK = "@raw{}@"
RAW = (
    "NaN",
    "-Infinity",
    "1e999",
    "-0",
    "0" * 40,
    "9" * 400,
    "9" * 5000,
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"\\u0000"',
    '{"a":1,"a":2}',
    '{"model":"x","model":null}',
    "[" * 300 + "]" * 300,
    "[" * 2000,
    '{"a":' * 300 + "1" + "}" * 300,
    "{" * 50,
    "tru",
    "'single'",
    "[1,]",
    '{"a":1,}',
    "/* comment */ 1",
    "\ufeff1",
    "0x10",
    ".5",
    "+1",
    '"\\x41"',
    '"line\nbreak"',
    '"unended',
)
"""Pieces of text in place of a JSON value; some are JSON, none is welcome."""
PLAIN: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
    0.5,
    -0.0,
    1e308,
    5e-324,
    "",
    " ",
    "\0",
    "a" * 600,
    "\U0001f600" * 9,
    "\u202e\u0301",
    "none",
    "0",
    "null",
    [],
    {},
    [None],
    [[]],
    [{}],
    ["a", 1],
    [1, "a"],
    [[1], "a"],
    [0] * 300,
    [""] * 130,
    {"": {}},
    {"type": "function"},
    {"type": None},
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}},
    {"type": "object", "properties": {"a": {"type": 1}}},
    {"a": {"b": {"c": {"d": []}}}},
    {"role": "user", "content": 1},
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "system"}],
    [{"role": "assistant", "tool_calls": [{"id": 1, "function": {"name": None, "arguments": {}}}]}],
    [{"role": "tool", "tool_call_id": [], "content": None}],
    {"1": 1e9, "-1": 0},
    {"regex": "(a+)+$", "choice": []},
    {"regex": "("},
    {"grammar": "root ::= root"},
    {"include_usage": 1, "x": 2},
)
_BYTES = (
    b"\0",
    b"\xff",
    b"\xc3\x28",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\r\n",
    b'"',
    b"\\",
    b"{",
    b"]",
    b",",
    b"\x1b[0m",
)


def damaged(data: bytes, chance: Random) -> bytes:
    """Return bytes with one to four places changed: flipped, cut out, doubled, or with something put in."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if not changed:
            break
        place = chance.randrange(len(changed))
        end = min(len(changed), place + chance.choice((1, 1, 2, 4, 16, 64)))
        match chance.randrange(6):
            case 0:
                changed[place] ^= 1 << chance.randrange(8)
            case 1:
                changed[place] = chance.randrange(256)
            case 2:
                del changed[place:end]
            case 3:
                changed[place:place] = changed[place:end] * chance.choice((1, 2, 9))
            case 4:
                changed[place:place] = chance.choice(_BYTES)
            case _:
                del changed[place:]
    return bytes(changed)


class BodyWriter:
    """Writes JSON in which some values are text that JSON does not have."""

    def __init__(self, chance: Random) -> None:
        self._chance = chance
        self._raw: dict[str, str] = {}

    def value(self) -> Any:
        """Return a value; what stands for raw text is replaced by `write`."""
        if self._chance.random() < 0.25:
            mark = _MARK.format(len(self._raw))
            self._raw[mark] = self._chance.choice(RAW)
            return mark
        return self._chance.choice(PLAIN)

    def write(self, document: Any) -> bytes:
        """Return the document as bytes."""
        text = json.dumps(document, ensure_ascii=self._chance.random() < 0.5, separators=(",", ":"))
        for mark, raw in self._raw.items():
            text = text.replace(f'"{mark}"', raw)
        return text.encode("utf-8", "surrogatepass")
