"""The end of an engine: leave queued requests to others, then hand back all it holds and deregister."""

from __future__ import annotations

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.engine.active_requests import ActiveRequests
from pagestream_streams.engine.assignment import Assignment
from pagestream_streams.engine.hand_back import HandBack
from pagestream_streams.engine.heartbeat import Heartbeat
from pagestream_streams.engine.identity import EngineIdentity
from pagestream_streams.protocol.records import FINGERPRINT_FIELD
from pagestream_streams.scripts import LEAVE, REGISTRY

_RETIRED_FIELD = "retired"
"""Of an engine's record: it takes nothing from others any more, though a heartbeat may still show it as living."""


class Retirement:
    """Takes one engine out of service."""

    def __init__(
        self,
        broker: Broker,
        identity: EngineIdentity,
        *,
        assignment: Assignment,
        active_requests: ActiveRequests,
        hand_back: HandBack,
        heartbeat: Heartbeat,
    ) -> None:
        """Create it; nothing is sent yet."""
        self._broker = broker
        self._identity = identity
        self._assignment = assignment
        self._active_requests = active_requests
        self._hand_back = hand_back
        self._heartbeat = heartbeat

    async def retire(self) -> bool:
        """Give up the partitions and claim nothing new; see EngineSession.retire."""
        identity, connection = self._identity, self._broker.connection
        self._assignment.retire()
        keyspace = connection.keyspace
        registry, own = keyspace.engines(identity.model), keyspace.engine(identity.engine_id)
        # Said before the others are read, so of two that retire together at least one knows of the other. The registry
        # alone does not say it: a heartbeat that is under way registers this engine again.
        await connection.pipeline(
            [("HSET", own, _RETIRED_FIELD, "1"), ("PEXPIRE", own, self._broker.settings.lease_ms)]
        )
        await connection.execute("ZREM", registry, identity.engine_id)
        living = await connection.run(REGISTRY, registry, "", 0)
        found = await connection.pipeline(
            [("HMGET", keyspace.engine(each.decode()), FINGERPRINT_FIELD, _RETIRED_FIELD) for each in living]
        )
        fingerprints = [fingerprint for fingerprint, retired in found if retired is None]
        alike = {identity.fingerprint.encode(), b"", None}  # None: an engine that has not published it yet
        others_differ = bool(fingerprints and identity.fingerprint) and not any(each in alike for each in fingerprints)
        self._assignment.same_fingerprint_only = others_differ
        return others_differ

    async def has_queued_with_same_fingerprint(self) -> bool:
        """Return whether begun requests with this engine's fingerprint are queued. Unavailable."""
        partitions = await self._broker.directory.all_partitions(self._identity.model)
        lengths = await self._broker.connection.pipeline(
            [("XLEN", where.resumes(self._identity.fingerprint)) for where in partitions]
        )
        return any(lengths)

    async def leave(self) -> None:
        """Hand back all that the engine holds and deregister it. Unavailable, ModelNotFound."""
        engine_id, connection = self._identity.engine_id, self._broker.connection
        partitions = await self._broker.directory.all_partitions(self._identity.model)
        await self._hand_back.hand_back({*self._active_requests, *await self._heartbeat.owned(partitions)})
        await connection.run_many([Call(LEAVE, where.prefix, (engine_id,)) for where in partitions])
        await connection.execute("ZREM", connection.keyspace.engines(self._identity.model), engine_id)
        await connection.execute("DEL", connection.keyspace.engine(engine_id))
