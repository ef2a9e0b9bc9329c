"""What the blocking and the asynchronous client share: everything but input and output."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import grpc
from pagestream.v1 import inference_pb2 as api

from pagestream_client.endpoints import Endpoints
from pagestream_client.errors import Position
from pagestream_client.patience import Patience
from pagestream_client.pursuit import Pursuit
from pagestream_client.settings import Reconnection, Transport


class ClientCore:
    """The gateways, how to call them, and what to do when they do not answer."""

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        api_key: str | None,
        credentials: grpc.ChannelCredentials | None,
        reconnection: Reconnection | None,
        transport: Transport | None,
    ) -> None:
        self._rng = random.Random()
        self.endpoints = Endpoints([targets] if isinstance(targets, str) else targets, self._rng)
        self.metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self.credentials = credentials
        self.reconnection = reconnection or Reconnection()
        self.transport = transport or Transport()

    def patience(self) -> Patience:
        """For one stream, or for one call."""
        return Patience(self.endpoints, self.reconnection, clock=time.monotonic, rng=self._rng)

    def pursuit(self, start: api.GenerateRequest | Position, *, deadline_s: float | None = None) -> Pursuit:
        """For one stream."""
        return Pursuit(
            start,
            self.patience(),
            deadline_s=deadline_s,
            settle_s=self.reconnection.settle_s,
            clock=time.monotonic,
        )
