"""Begin one POST in each round of the event loop: a burst of a thousand must not hold up the streams."""

from pagestream_streams.tasks import Turns
from starlette.types import ASGIApp, Receive, Scope, Send


class Paced:
    """ASGI middleware. Probes and other quick requests do not wait."""

    def __init__(self, app: ASGIApp, turns: Turns) -> None:
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._turns.take()
        await self._app(scope, receive, send)
