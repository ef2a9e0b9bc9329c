"""The client over HTTP for programs that block."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from pagestream_client.chunks import FinishReason
from pagestream_client.errors import Position, StreamClosed
from pagestream_client.http.answers import finish_reason_of, model_info_of, request_info_of, request_page_of
from pagestream_client.http.configuration import HttpConfiguration, call_failure
from pagestream_client.http.failures import CallRefused, failure_of_answer
from pagestream_client.http.library import import_httpx2
from pagestream_client.http.requests import HttpRequest, http_request, list_path
from pagestream_client.http.stream import HttpStream
from pagestream_client.http.transport import HttpTransport
from pagestream_client.requests import Input, OnDisconnect, SamplingOptions
from pagestream_client.settings import Reconnection
from pagestream_client.stream import Stream
from pagestream_client.views import ModelInfo, RequestInfo, RequestPage

if TYPE_CHECKING:
    import httpx2


class HttpClient:
    """Call any of several gateways over HTTP, and continue at another one when a connection dies.

    Use it from any number of threads, as `with HttpClient([...]) as client`, or end it by `close`.

    Args:
        urls: base URL of each gateway's HTTP port, with or without `/v1`.
        api_key: sent to the gateways, where they require one.
        transport: how connections are made and watched.

    Raises:
        ImportError: the extra `pagestream-client[http]` is not installed.
        ValueError: a URL is not http(s)://host[:port].
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        api_key: str | None = None,
        reconnection: Reconnection | None = None,
        transport: HttpTransport | None = None,
    ) -> None:
        self._configuration = HttpConfiguration(urls, api_key=api_key, reconnection=reconnection, transport=transport)
        self._http: httpx2.Client = import_httpx2().Client(**self._configuration.library_options())
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        """Return the client; connections are made when they are needed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """End open streams, whose readers get StreamClosed, and all connections."""
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.abandon()
        self._http.close()

    def generate(
        self,
        model: str = "",
        prompt: str | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        continue_final_message: bool = False,
        deadline_s: float | None = None,
        idempotency_key: str | None = None,
        on_disconnect: OnDisconnect | str = OnDisconnect.CANCEL,
        priority: int = 0,
        client_request_id: str = "",
        extra_body: Mapping[str, Any] | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Stream:
        """Request a generation of /v1/completions, or of /v1/chat/completions where `messages` are given.

        The arguments are those of `Client.generate`. Chunks have no token ids and no log probabilities over HTTP.

        Args:
            extra_body: further fields of the request's body.

        Raises:
            InvalidRequest: an argument cannot be sent. All other errors are raised by the stream.
        """
        request = http_request(
            model,
            Input(prompt, prompt_token_ids, messages, continue_final_message),
            sampling,
            idempotency_key=idempotency_key,
            on_disconnect=on_disconnect,
            priority=priority,
            client_request_id=client_request_id,
            extra_body=extra_body,
        )
        return self._stream(request, deadline_s)

    def resume(self, request_id: str, next_index: int = 0, digest: str = "") -> Stream:
        """Read a request's stream from a position on; see `Client.resume`."""
        return self._stream(Position(request_id, next_index, digest), None)

    def cancel(self, request_id: str) -> FinishReason:
        """End a request in any state; return how it ended, now or before. Raises RequestNotFound."""
        body = self._ask("DELETE", f"/v1/requests/{request_id}")
        return finish_reason_of(body.get("finish_reason")) or FinishReason.CANCELLED

    def get_request(self, request_id: str) -> RequestInfo:
        """Return the state of a request. Raises RequestNotFound."""
        return request_info_of(self._ask("GET", f"/v1/requests/{request_id}"))

    def list_requests(self, *, limit: int | None = None, after: str = "") -> RequestPage:
        """Return the requests of this client's tenant, newest first, each with its state.

        Args:
            limit: most requests of the page; None: as many as the server returns unasked.
            after: id of the last request of the page before; empty: the first page.

        Raises:
            InvalidRequest: the limit is out of range, or the id is not in the list.
        """
        return request_page_of(self._ask("GET", list_path(limit, after)))

    def list_models(self) -> list[ModelInfo]:
        """Return the models by name, also those that no engine runs now."""
        return [model_info_of(model) for model in self._ask("GET", "/v1/models")["data"]]

    def _ask(self, method: str, path: str) -> Mapping[str, Any]:
        """Make one call, at as many gateways as it takes: all of these calls may be repeated."""
        configuration, retry = self._configuration, self._configuration.retry_state()
        while True:
            if self._http.is_closed:
                raise StreamClosed("the client is closed")
            target = configuration.endpoints.current
            try:
                response = self._http.request(method, target + path, timeout=configuration.transport.answer_timeout_s)
                if response.status_code != 200:
                    raise CallRefused(failure_of_answer(response.status_code, response.headers, response.content))
            except Exception as error:
                failure = call_failure(error)
                if failure is None:
                    raise
                delay_s = retry.next_delay(failure, target)
            else:
                retry.worked(target)
                body: Mapping[str, Any] = response.json()
                return body
            time.sleep(delay_s)

    def _stream(self, start: HttpRequest | Position, deadline_s: float | None) -> Stream:
        state = self._configuration.stream_state(start, deadline_s=deadline_s)
        stream = HttpStream(self._configuration, state, self._http)
        with self._lock:
            self._streams.add(stream)
        return stream
