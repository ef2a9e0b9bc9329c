import socket

import pytest


@pytest.fixture
def unused_url() -> str:
    """The URL of a port on which no server listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
