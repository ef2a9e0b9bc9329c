"""Keeps an engine's claims and its model's card in line with the contexts that the living engines hold."""

from __future__ import annotations

import time
from collections.abc import Collection

from pagestream_streams.admin.broker import Broker
from pagestream_streams.admin.directory import bounds, read_contexts
from pagestream_streams.engine.assignment import Assignment
from pagestream_streams.engine.identity import EngineIdentity
from pagestream_streams.errors import ModelNotFound


class LivingContexts:
    """Reads the context of each engine once, as it is constant for the life of a session (docs/decisions/0172)."""

    def __init__(self, broker: Broker, identity: EngineIdentity, assignment: Assignment) -> None:
        """Create it; nothing is read yet."""
        self._broker = broker
        self._identity = identity
        self._assignment = assignment
        self._known = {identity.engine_id: identity.max_model_len}
        self._shorter_since: float | None = None

    async def update(self, living: Collection[str]) -> None:
        """Note which engines live. Unavailable; the next beat tries again.

        The card grows at once. It shrinks when no engine has held its context for settings.fingerprint_grace_ms: an
        engine that restarts in that time finds the requests that only it can run.
        """
        unknown = [each for each in living if each not in self._known]
        if unknown:
            self._known |= await read_contexts(self._broker.connection, unknown)
        own = {self._identity.engine_id}
        self._known = {each: context for each, context in self._known.items() if each in own or each in living}
        self._assignment.leaves_longer = self._is_outlasted()
        if 0 in self._known.values() or not self._known.keys() >= set(living):
            return
        longest, default = bounds([self._known[each] for each in living] or [self._identity.max_model_len])
        try:
            card = await self._broker.directory.card(self._identity.model)
            longest = longest if self._may_say(longest, card.max_model_len) else card.max_model_len
            if (longest, default) != (card.max_model_len, card.default_model_len):
                await self._broker.directory.set_contexts(self._identity.model, longest, default)
        except ModelNotFound:  # withdrawn since the beat began
            return

    def _is_outlasted(self) -> bool:
        own = self._identity.max_model_len
        return own > 0 and any(each == 0 or each > own for each in self._known.values())

    def _may_say(self, longest: int, said: int) -> bool:
        """Whether the card may say `longest` in place of `said`."""
        now = time.monotonic()
        if longest >= said:
            self._shorter_since = None
            return True
        self._shorter_since = now if self._shorter_since is None else self._shorter_since
        return now - self._shorter_since >= self._broker.settings.fingerprint_grace_ms / 1000
