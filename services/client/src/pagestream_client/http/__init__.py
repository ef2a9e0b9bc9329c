"""The client over HTTP, which needs the extra `pagestream-client[http]`: OpenAI's routes, streamed and resumed."""

from pagestream_client.http.async_client import AsyncHttpClient
from pagestream_client.http.client import HttpClient
from pagestream_client.http.transport import HttpTransport

__all__ = ["AsyncHttpClient", "HttpClient", "HttpTransport"]
