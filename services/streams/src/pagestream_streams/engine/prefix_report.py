"""What an engine makes known of its prefix cache: the beginnings of the prompts that it has claimed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

from pagestream_streams.connection.connection import Connection
from pagestream_streams.engine.identity import EngineIdentity
from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.keys import prefixes_of
from pagestream_streams.protocol.records import Claim
from pagestream_streams.settings import StreamsSettings
from pagestream_streams.tasks import within

_log = logging.getLogger(__name__)

_MOST_DIGESTS = 4096  # of one heartbeat: 32 KiB
_MOST_ENTRIES = 1024  # of the stream, about
_KEPT_MS = 3_600_000


class PrefixReport:
    """Publishes digests with the heartbeats, in a bounded stream of the model that gateways read.

    What is lost on the way, or evicted later, costs a cached prefix and nothing else.
    """

    def __init__(self, connection: Connection, settings: StreamsSettings, identity: EngineIdentity) -> None:
        """Create it with nothing to publish."""
        self._connection = connection
        self._settings = settings
        self._identity = identity
        self._digests: deque[bytes] = deque(maxlen=_MOST_DIGESTS)

    def note(self, claims: Iterable[Claim]) -> None:
        """Note what claimed requests will have cached: of the prompts by which they were placed."""
        first_tokens = self._settings.placement_tokens
        for claim in claims:
            for prompt in claim.spec.prompts[:1]:
                found = prefixes_of(prompt.ids, first_tokens, claim.spec.cache_salt)
                self._digests += [digest for _, digest in found]

    async def publish(self, limit_s: float | None) -> None:
        """Publish what was noted since the last time; `limit_s` bounds the wait in seconds, None does not."""
        if not self._digests:
            return
        digests = b"".join(self._digests)
        self._digests.clear()
        key = self._identity.keyspace.engine_prefixes(self._identity.model)
        entry = ("XADD", key, "MAXLEN", "~", _MOST_ENTRIES, "*", "engine", self._identity.engine_id, "digests", digests)
        try:
            async with within(limit_s, "the engine's prefixes"):
                await self._connection.pipeline([entry, ("PEXPIRE", key, _KEPT_MS)])
        except Unavailable as error:
            _log.debug("%s: its prefixes are not published: %s", self._identity.engine_id, error)
