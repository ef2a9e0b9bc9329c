"""What can be wrong with what the law is given, as one tree."""

# ruff: noqa: N818 -- said as people say it: "the policy is invalid"

from __future__ import annotations


class ScalingError(Exception):
    """The root of this package's errors."""


class PolicyInvalid(ScalingError, ValueError):
    """A number of a policy is outside its range."""

    def __init__(self, *, field: str, given: object, expected: str) -> None:
        """`field` is the dotted name, e.g. "kv_utilization.target"."""
        super().__init__(f"scaling policy: {field} is {given!r}; it must be {expected}")
        self.field = field
        self.given = given
        self.expected = expected


class MemoryInvalid(ScalingError, ValueError):
    """A serialised memory can't be read. A fresh one is the right answer: the law then holds scale-in for a window."""
