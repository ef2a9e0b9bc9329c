"""What the kernels raise."""

from __future__ import annotations


class KernelError(Exception):
    """Root of the errors of this package."""


class KernelArgumentError(KernelError, ValueError):
    """An argument has the wrong type, shape, dtype, stride or device; the text names what was given and expected."""


class KernelUnavailableError(KernelError, RuntimeError):
    """A kernel was launched where it cannot run: no Triton, or tensors on a device that Triton does not drive."""
