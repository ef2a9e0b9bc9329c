"""What the clients of both protocols share beside their I/O: the gateways, and the limits of retries."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from pagestream_client.endpoints import Endpoints
from pagestream_client.retry import RetryState
from pagestream_client.settings import Reconnection


class Configuration:
    """The gateways of a client and how it retries. The protocols add how their calls are made."""

    def __init__(self, targets: Sequence[str], reconnection: Reconnection | None) -> None:
        self._rng = random.Random()
        self.endpoints = Endpoints(targets, self._rng)
        self.reconnection = reconnection or Reconnection()

    def retry_state(self) -> RetryState:
        """Return the retry state of one stream, or of one call."""
        return RetryState(self.endpoints, self.reconnection, clock=time.monotonic, rng=self._rng)
