"""How a client calls its gateways over gRPC."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import grpc
from pagestream.v1 import inference_pb2 as api

from pagestream_client.configuration import Configuration
from pagestream_client.errors import Position
from pagestream_client.grpc.stream_state import GrpcStreamState
from pagestream_client.grpc.transport import Transport
from pagestream_client.settings import Reconnection

_TARGET = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}")


class GrpcConfiguration(Configuration):
    """Gateways as "host:port", with what each call and each channel carries.

    Raises:
        ValueError: there is no target, or one is not "host:port".
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        api_key: str | None,
        credentials: grpc.ChannelCredentials | None,
        reconnection: Reconnection | None,
        transport: Transport | None,
    ) -> None:
        super().__init__(checked_targets([targets] if isinstance(targets, str) else targets), reconnection)
        self.metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self.credentials = credentials
        self.transport = transport or Transport()

    def stream_state(
        self, start: api.GenerateRequest | Position, *, deadline_s: float | None = None
    ) -> GrpcStreamState:
        """Return the state of one stream."""
        return GrpcStreamState(
            start,
            self.retry_state(),
            deadline_s=deadline_s,
            settle_s=self.reconnection.settle_s,
            clock=time.monotonic,
        )


def checked_targets(targets: Sequence[str]) -> Sequence[str]:
    """Return the targets. Raises ValueError unless each is "host:port"."""
    for target in targets:
        if not _TARGET.fullmatch(target):
            raise ValueError(f"a gateway is given as 'host:port' (or '[address]:port'), got {target!r}")
    return targets
