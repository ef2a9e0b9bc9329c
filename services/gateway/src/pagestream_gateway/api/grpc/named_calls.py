"""A gRPC server that a method's name can't end.

grpc.aio decodes the name of each call as UTF-8 in the loop that takes calls, and one call whose name is no text ends
the server (grpcio 1.85.1, `_server_main_loop`). Calls of registered methods are told apart in gRPC's core and never get
there by their name. All others, which nothing could answer, are refused here without a look at it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import grpc
from grpc._cython import cygrpc
from grpc.aio._server import Server

_UNIMPLEMENTED: int = grpc.StatusCode.UNIMPLEMENTED.value[0]


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """Takes calls. The name of the overridden method is grpcio's own; a test shows that it is still called."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._refusals: set[asyncio.Task[None]] = set()
        """Of calls whose method is not registered; each ends with its connection, at the latest."""

    async def _request_call(self) -> Any:
        """Refuse calls of methods that are not registered, for as long as the server runs."""
        while True:
            call = await super()._request_call()
            refusal = asyncio.create_task(_refuse(call))
            self._refusals.add(refusal)
            refusal.add_done_callback(self._refusals.discard)


class _Server(Server):
    """`grpc.aio.server` with that core; the constructor of the base makes one of its own."""

    def __init__(self, core: _Core, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._server = loop, core


def named_calls_server(
    *, options: Sequence[tuple[str, Any]], interceptors: Sequence[grpc.aio.ServerInterceptor]
) -> grpc.aio.Server:
    """Return a server for registered methods alone: `add_registered_method_handlers`."""
    loop = cygrpc.get_working_loop()
    core = _Core(loop, None, (), tuple(interceptors), tuple(options), None)
    return cast(grpc.aio.Server, _Server(core, loop))


async def _refuse(call: Any) -> None:
    header = cygrpc.SendInitialMetadataOperation(None, 0)
    loop = asyncio.get_running_loop()
    try:
        await cygrpc._send_error_status_from_server(call, _UNIMPLEMENTED, "Method not found!", (), header, loop)
    except cygrpc.InternalError:
        return  # the caller has left
