"""The gateway without its protocols: what the APIs call."""

import asyncio
from dataclasses import dataclass

from pagestream_streams import Broker
from pagestream_streams.byte_budget import ByteBudget
from pagestream_streams.errors import Unavailable
from pagestream_streams.tasks import Turns
from pagestream_telemetry.process import Telemetry

from pagestream_gateway.core.batches.service import Batches
from pagestream_gateway.core.calls import Calls
from pagestream_gateway.core.identities.authenticator import Authenticator
from pagestream_gateway.core.identities.identity import Credentials, Identity
from pagestream_gateway.core.memory_monitor import MemoryMonitor
from pagestream_gateway.core.models import Models
from pagestream_gateway.core.open_streams import OpenStreams
from pagestream_gateway.core.queue_monitor import QueueMonitor
from pagestream_gateway.core.redis_timeout import RedisTimeout
from pagestream_gateway.core.requests import AcceptedRequests
from pagestream_gateway.core.submission import Submission
from pagestream_gateway.core.tokenization import PendingRequests, TokenizePool
from pagestream_gateway.errors import GatewayStopping
from pagestream_gateway.settings import Settings


@dataclass(frozen=True)
class Gateway:
    """One process' parts. Nothing that a stream needs is held here: all of it is in Redis."""

    settings: Settings
    broker: Broker
    limit: RedisTimeout
    authenticator: Authenticator
    models: Models
    submission: Submission
    requests: AcceptedRequests
    pool: TokenizePool
    pending: PendingRequests
    streams: OpenStreams
    calls: Calls
    queue: QueueMonitor
    memory: MemoryMonitor
    telemetry: Telemetry
    answer_budget: ByteBudget
    """Bytes of answers that are not streamed."""
    batches: Batches
    turns: Turns
    """Of requests that are read and checked: a burst of them must not hold up the streams."""

    async def identify(self, credentials: Credentials) -> Identity:
        """Return who makes a call with these credentials. Raises GatewayStopping or Unauthenticated."""
        if self.streams.is_stopping:
            raise GatewayStopping
        return await self.authenticator.identify(credentials)

    async def is_ready(self) -> bool:
        """Return whether Redis answers, a model is known, and the process is not stopping."""
        try:
            await self.limit.wait(self.broker.ping())
            return await self.models.is_any_known() and not self.streams.is_stopping
        except Unavailable:
            return False

    async def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text form; those of the queue are absent where Redis does not answer."""
        await asyncio.gather(self.queue.refresh(), self.memory.refresh())
        return self.telemetry.render()
