"""The gateway without its protocols: what the APIs call."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pagestream.v1.inference_pb2 import FinishReason
from pagestream_streams import Broker
from pagestream_streams.errors import Unavailable
from pagestream_streams.tasks import ByteBudget, Turns
from pagestream_telemetry import catalog
from pagestream_telemetry.process import Telemetry

from pagestream_gateway.auth.audit import Audit
from pagestream_gateway.auth.authenticator import Authenticator, Reload
from pagestream_gateway.auth.identity import Administrator, Credentials, Identity
from pagestream_gateway.batches.uploads import Batches
from pagestream_gateway.calls import Calls, RedisTimeout
from pagestream_gateway.errors import GatewayStopping, Unauthenticated, WrongCredential
from pagestream_gateway.models import Models
from pagestream_gateway.monitors import EngineMonitor, MemoryMonitor, QueueMonitor
from pagestream_gateway.settings import Settings
from pagestream_gateway.streams.accepted import AcceptedRequests, OpenStreams
from pagestream_gateway.submission import Submission
from pagestream_gateway.text.tokenization import PendingRequests, TokenizePool

_PUBLIC_METRICS = frozenset({catalog.STREAMS_OPEN})


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
    engines: EngineMonitor
    telemetry: Telemetry
    answer_budget: ByteBudget
    """Bytes of answers that are not streamed."""
    batches: Batches
    audit: Audit
    reloads: Sequence[Reload]
    """What is read again when an administrator asks for it."""
    turns: Turns
    """Of requests that are read and checked: a burst of them must not hold up the streams."""

    async def identify(self, credentials: Credentials) -> Identity:
        """Return who makes a call with these credentials.

        Raises GatewayStopping, Unauthenticated, WrongCredential, CredentialsUnavailable.
        """
        with self._checking(credentials):
            return replace(await self.authenticator.identify(credentials), peer=credentials.peer)

    async def identify_administrator(self, credentials: Credentials) -> Administrator:
        """Return which administrator makes a call. Raises as `identify`."""
        with self._checking(credentials):
            return await self.authenticator.administrator(credentials)

    async def cancel(self, request_id: str, identity: Identity) -> FinishReason:
        """End a caller's request in whatever state it is; return how it ended. Raises RequestNotFound, Unavailable."""
        reason = await self.requests.cancel(request_id, identity.tenant)
        self.audit.cancelled(identity, request_id)
        return reason

    async def discard(self, request_id: str, identity: Identity) -> None:
        """End a caller's request, and let it expire within a minute. Raises RequestNotFound, Unavailable."""
        await self.requests.discard(request_id, identity.tenant)
        self.audit.cancelled(identity, request_id)

    @contextmanager
    def _checking(self, credentials: Credentials) -> Iterator[None]:
        if self.streams.is_stopping:
            raise GatewayStopping
        try:
            yield
        except (Unauthenticated, WrongCredential) as error:
            self.audit.failed(credentials.peer, str(error))
            raise

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

    def public_exposition(self) -> bytes:
        """Return what anyone may read, in the same form: what tells nothing of tenants, models and machines."""
        return self.telemetry.render_some(_PUBLIC_METRICS)
