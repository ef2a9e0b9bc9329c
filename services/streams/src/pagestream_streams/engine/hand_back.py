"""Hand requests back, so that any engine goes on with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.engine.active_requests import ActiveRequests
from pagestream_streams.engine.identity import EngineIdentity
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import Argument
from pagestream_streams.scripts import HAND_BACK


class HandBack:
    """Returns requests of one engine to their queues."""

    def __init__(self, broker: Broker, identity: EngineIdentity, active_requests: ActiveRequests) -> None:
        """Create it; nothing is sent yet."""
        self._broker = broker
        self._identity = identity
        self._active_requests = active_requests

    async def hand_back(self, request_ids: Collection[str], *, failed: bool = False) -> None:
        """Hand back requests at their position; see EngineSession.hand_back."""
        identity = self._identity
        by_partition: defaultdict[Partition, list[Argument]] = defaultdict(list)
        for request_id in request_ids:
            fence = self._active_requests.fence(request_id)
            by_partition[identity.partition_of(request_id)] += [request_id, *fence]
        if failed:
            for where in await self._broker.directory.all_partitions(identity.model):
                by_partition[where] += []
        # If the script's run is lost, the next heartbeats find requests that Redis shows and that aren't held.
        self._active_requests.drop(request_ids)
        bell, why = identity.keyspace.doorbell(identity.model), "failed" if failed else "stop"
        control_ms = self._broker.settings.control_ms
        await self._broker.connection.run_many(
            [
                Call(HAND_BACK, where.prefix, (identity.engine_id, bell, where.number, why, control_ms, *triples))
                for where, triples in by_partition.items()
            ]
        )
