"""When an answer's stream is kept alive, on a clock that skips the waiting."""

import asyncio
import selectors
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from pagestream.v1.records_pb2 import RequestSpec
from pagestream_gateway import Settings
from pagestream_gateway.api.openai.answers import Reading
from pagestream_gateway.api.openai.completions import CompletionWriter
from pagestream_gateway.api.openai.streaming import EventStream
from pagestream_gateway.core.identities.identity import Identity
from starlette.types import Receive, Scope, Send


class SkippingSelector(selectors.SelectSelector):
    """Returns at once, and adds up the time that it should have waited."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.skipped_s += timeout or 0.0
        return super().select(0)


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while it waits."""

    def __init__(self) -> None:
        self.selector = SkippingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.skipped_s


class Talk(EventStream):
    """Sends text 10 s after its beginning, and at 100 s."""

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        await self._start(send)
        for pause_s in (10, 90):
            await asyncio.sleep(pause_s)
            await self._send(send, "text")
        return "ok"


def test_empty_lines_come_when_nothing_was_sent_for_so_long() -> None:
    sent: list[tuple[int, bytes]] = []

    async def send(message: Mapping[str, Any]) -> None:
        sent.append((round(asyncio.get_running_loop().time()), message.get("body", b"")))

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def place(spec: RequestSpec) -> None:
        """An engine has the request."""

    async def talk() -> None:
        gateway: Any = SimpleNamespace(settings=Settings(), requests=SimpleNamespace(place=place))
        call: Any = SimpleNamespace(api="completions", rates=(), end=lambda outcome: None)
        reading = Reading(RequestSpec(), Identity("t"), call, CompletionWriter(RequestSpec()))
        await Talk(gateway, reading)({}, receive, send)

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(talk())
    times = [at for at, body in sent if body == b"\n\n"]
    assert times == [25, 40, 55, 70, 85], sent
