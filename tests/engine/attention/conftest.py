from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.kernels.worker import KernelWorker


@pytest.fixture(scope="session")
def interpreter() -> Iterator[KernelWorker]:
    """A process in which Triton interprets."""
    with KernelWorker("interpret") as worker:
        yield worker
