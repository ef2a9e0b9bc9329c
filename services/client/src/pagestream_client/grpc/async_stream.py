"""A stream over gRPC for asyncio."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import grpc
from pagestream.v1 import inference_pb2 as api

from pagestream_client.async_stream import AsyncStream
from pagestream_client.chunks import Chunk
from pagestream_client.failures import Failure
from pagestream_client.grpc.configuration import GrpcConfiguration
from pagestream_client.grpc.connections import Connection, Connections
from pagestream_client.grpc.status import failure_of
from pagestream_client.grpc.stream import STATUS_LIMIT_S
from pagestream_client.grpc.stream_state import GrpcStreamState


class AsyncGrpcStream(AsyncStream):
    """A stream over calls to Generate and Resume."""

    _state: GrpcStreamState

    def __init__(self, configuration: GrpcConfiguration, state: GrpcStreamState, connections: Connections) -> None:
        super().__init__(state, configuration.endpoints)
        self._metadata = configuration.metadata
        self._connections = connections
        self._connection: Connection | None = None
        self._call: Any = None

    async def _read(self) -> tuple[bool, Chunk | None]:
        if self._call is None:
            call, self._target = self._state.next_call(), self._endpoints.current
            connection = self._connection = self._connections.to(self._target)
            stub = connection.stub
            method = stub.Generate if isinstance(call.request, api.GenerateRequest) else stub.Resume
            self._call = method(call.request, timeout=call.timeout_s, metadata=self._metadata)
        response = await self._call.read()
        return (False, None) if response is grpc.aio.EOF else (True, self._state.take(response, self._target))

    def _failure_of(self, error: Exception) -> Failure | None:
        if not isinstance(error, grpc.RpcError):
            return None
        failure = failure_of(error)
        self._connections.failed(self._connection, failure)
        return failure

    async def _finish(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            try:
                with suppress(TimeoutError):  # the log has ended; how this connection ends changes nothing
                    async with asyncio.timeout(STATUS_LIMIT_S):
                        await call.code()
            finally:
                call.cancel()
                self._connection = None

    def _interrupt(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._connection = None  # after the call's end: it may hold the connection's last reference

    async def _hang_up(self) -> None:
        self._interrupt()
