from __future__ import annotations

import pytest
from support.kernels.worker import KernelWorker, shared_worker


@pytest.fixture(scope="session")
def interpreter() -> KernelWorker:
    """A process in which Triton interprets."""
    return shared_worker("interpret")


@pytest.fixture(scope="session")
def compiler() -> KernelWorker:
    """A process in which Triton compiles."""
    return shared_worker("compile")
