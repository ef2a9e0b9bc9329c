"""A copier of offloaded weights that copies as late as it may, and leaves NaN until then."""

from __future__ import annotations

from pagestream_engine.models.offload.copier import Wait
from torch import Tensor

NAN_BYTES = 0xFF
"""Every floating point number of such bytes is NaN."""


class LateCopier:
    """Copies when the computation waits for it, on the device of the test."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        """What was begun and waited for, with the address of the page in host memory."""
        self.fails_after: int | None = None
        """Copies that begin before one runs out of memory; None: none does."""

    def begin(self, target: Tensor, source: Tensor) -> Wait:
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                self.fails_after = None
                raise MemoryError("no room to launch a copy")
        self.events.append(("begin", source.data_ptr()))
        target.fill_(NAN_BYTES)

        def wait() -> None:
            self.events.append(("wait", source.data_ptr()))
            target.copy_(source)

        return wait
