"""Whose failure it is that the making of a text has raised."""

from __future__ import annotations

_PANIC = "PanicException"
"""Name of the type that pyo3 raises for a panic of Rust: a BaseException, and one of its own in each extension."""


def is_fault_of_request(error: BaseException) -> bool:
    """Whether an error belongs to the request whose text was made: any Exception, and a panic of the tokenizer.

    What ends the program (KeyboardInterrupt, SystemExit) or a generator does not.
    """
    return isinstance(error, Exception) or type(error).__name__ == _PANIC
