"""What the emulated machine code does wrong."""

from __future__ import annotations


class Fault(Exception):  # noqa: N818 - the word of GPUs
    """An access outside of the launch's tensors, an unaligned one, a race, or an instruction that isn't emulated."""
