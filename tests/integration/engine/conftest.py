"""Engines in the test's own process."""

from collections.abc import Iterator

import pytest
from support.processes.forked_ranks import forked_ranks


@pytest.fixture(scope="package", autouse=True)
def ranks() -> Iterator[None]:
    """Fork the engines' executors and ranks."""
    with forked_ranks():
        yield
