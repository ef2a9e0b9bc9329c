"""The gateways of a deployment as commands see them: which ones there are, and their answers in the terminal."""

from pagestream_cli.client.answer import show_answer, stream_answer
from pagestream_cli.client.endpoint import Endpoint, find_endpoint

__all__ = ["Endpoint", "find_endpoint", "show_answer", "stream_answer"]
