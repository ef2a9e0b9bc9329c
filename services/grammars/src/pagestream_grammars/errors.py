"""What is wrong with a constraint."""

from __future__ import annotations


class GrammarError(ValueError):
    """A constraint that can't be held to. The text says what was given, and what is expected.

    Args:
        field: json, regex, choice or grammar.
    """

    def __init__(self, field: str, given: object, expected: str) -> None:
        self.field = field
        self.given = given
        self.expected = expected
        super().__init__(f"{field}: given {given}, expected {expected}")


class GrammarRefusedError(GrammarError):
    """llguidance can't compile it. The text is its reason."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, "what can't be compiled", reason)
        self.args = (f"the {field} can't be compiled: {reason}",)
