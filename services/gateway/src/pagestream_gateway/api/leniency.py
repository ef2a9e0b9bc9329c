"""What every route accepts beside its own form.

That is HEAD where there is GET, a slash at the end of the path, and a key as Anthropic's clients send it.
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Lenient:
    """ASGI middleware in front of the routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with the path without its last slash; HEAD as GET, without the body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        if path != "/" and path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        scope = _with_authorization(scope)
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        answer = _HeadersAlone(receive, send)
        await self._app({**scope, "method": "GET"}, answer.receive, answer.send)


def _with_authorization(scope: Scope) -> Scope:
    """Return a call with `x-api-key` as its Authorization, where it has none."""
    headers = dict(scope["headers"])
    if b"x-api-key" not in headers or b"authorization" in headers:
        return scope
    return {**scope, "headers": [*scope["headers"], (b"authorization", b"Bearer " + headers[b"x-api-key"])]}


class _HeadersAlone:
    """Sends the headers of an answer, and is a client that leaves then: a stream ends there."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_complete = False

    async def receive(self) -> Message:
        return {"type": "http.disconnect"} if self._is_complete else await self._receive()

    async def send(self, message: Message) -> None:
        if self._is_complete:
            return
        await self._send(message)
        if message["type"] == "http.response.start":
            self._is_complete = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
