"""A stream over gRPC for programs that block."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import grpc
from pagestream.v1 import inference_pb2 as api

from pagestream_client.chunks import Chunk
from pagestream_client.errors import StreamClosed
from pagestream_client.failures import Failure
from pagestream_client.grpc.configuration import GrpcConfiguration
from pagestream_client.grpc.connections import Connection, Connections
from pagestream_client.grpc.status import failure_of
from pagestream_client.grpc.stream_state import GrpcStreamState
from pagestream_client.stream import Stream

STATUS_LIMIT_S = 1.0
"""Seconds to wait for a call's status after the last chunk: gateways count a call without one as disconnected."""


class GrpcStream(Stream):
    """A stream over calls to Generate and Resume."""

    _state: GrpcStreamState

    def __init__(self, configuration: GrpcConfiguration, state: GrpcStreamState, connections: Connections) -> None:
        super().__init__(state, configuration.endpoints)
        self._metadata = configuration.metadata
        self._connections = connections
        self._connection: Connection | None = None
        self._call: Any = None

    def _read(self) -> tuple[bool, Chunk | None]:
        call = self._call
        if call is None:
            call = self._call = self._called()
            if self._closing.is_set():  # by another thread, which did not see this call
                call.cancel()
        response = next(call, None)
        return (False, None) if response is None else (True, self._state.take(response, self._target))

    def _called(self) -> Any:
        call, self._target = self._state.next_call(), self._endpoints.current
        connection = self._connection = self._connections.to(self._target)
        method = connection.stub.Generate if isinstance(call.request, api.GenerateRequest) else connection.stub.Resume
        try:
            return method(call.request, timeout=call.timeout_s, metadata=self._metadata)
        except ValueError as error:  # another thread has just closed the channel
            raise StreamClosed("the client was closed before the stream had ended") from error

    def _failure_of(self, error: Exception) -> Failure | None:
        if not isinstance(error, grpc.RpcError):
            return None
        failure = failure_of(error)
        self._connections.failed(self._connection, failure)
        return failure

    def _finish(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            try:
                with suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
                    call.exception(STATUS_LIMIT_S)  # the log has ended; how this connection ends changes nothing
            finally:
                call.cancel()
                self._connection = None

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._connection = None  # after the call's end: it may hold the connection's last reference
