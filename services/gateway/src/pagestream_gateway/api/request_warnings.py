"""Warnings about a request that is served all the same: what of its body was left out, in a header of its answer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "X-Request-Warnings"
_MOST = 16
_MAX_CHARS = 240  # of one warning: proxies bound a header by some kilobytes


class RequestWarnings:
    """What was left out of one request's body, and whether its unknown fields are."""

    def __init__(self, *, ignores_unknown: bool = False) -> None:
        self.ignores_unknown = ignores_unknown
        """Whether fields that nothing declares are left out; otherwise they are refused."""
        self._places: list[str] = []
        self._texts: list[str] = []
        self._num_left = 0

    @contextmanager
    def within(self, place: str) -> Iterator[None]:
        """Let warnings name fields by their path in the whole body, of which `place` is a part."""
        self._places.append(place)
        try:
            yield
        finally:
            self._places.pop()

    def add(self, field: str, text: str) -> None:
        """Add a warning about a field of the part that is being read."""
        if len(self._texts) == _MOST:
            self._num_left += 1
            return
        path = ".".join((*self._places, field))
        self._texts.append(f"{path}: {text}"[:_MAX_CHARS])

    @property
    def header(self) -> str:
        """The header's value, printable ASCII; "" without a warning."""
        more = [f"{self._num_left} more"] if self._num_left else []
        return json.dumps("; ".join((*self._texts, *more)))[1:-1]


_CURRENT: ContextVar[RequestWarnings] = ContextVar("pagestream_request_warnings")


def current_warnings() -> RequestWarnings:
    """Return the warnings of the request that is being read; outside of one, some that nothing shows."""
    return _CURRENT.get(None) or RequestWarnings()


@contextmanager
def collecting(warnings: RequestWarnings) -> Iterator[None]:
    """Let what is read in a block add to `warnings`."""
    token = _CURRENT.set(warnings)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class WithWarnings:
    """ASGI middleware: the warnings of each call become a header of its answer."""

    def __init__(self, app: ASGIApp, *, ignores_unknown: bool) -> None:
        self._app = app
        self._ignores_unknown = ignores_unknown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        warnings = RequestWarnings(ignores_unknown=self._ignores_unknown)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and (text := warnings.header):
                MutableHeaders(scope=message)[HEADER] = text
            await send(message)

        with collecting(warnings):
            await self._app(scope, receive, answer)
