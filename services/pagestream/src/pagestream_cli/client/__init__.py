"""Reads answers from a gateway over HTTP, and goes on by itself when a connection dies."""

from pagestream_cli.client.answer import Delta, Reconnection, stream_answer
from pagestream_cli.client.endpoint import Endpoint, find_endpoint

__all__ = ["Delta", "Endpoint", "Reconnection", "find_endpoint", "stream_answer"]
