"""A transport with which the `openai` client continues at another gateway when one dies; needs the extra `http`."""

from pagestream_client.openai.configuration import HttpTransport
from pagestream_client.openai.resuming import ResumingTransport, transport

__all__ = ["HttpTransport", "ResumingTransport", "transport"]
