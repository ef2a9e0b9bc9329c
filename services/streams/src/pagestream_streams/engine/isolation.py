"""The suspect request that an engine runs isolated, with nothing beside it (docs/decisions/0024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagestream_streams.admin.broker import Broker
from pagestream_streams.connection.connection import Call
from pagestream_streams.engine.active_requests import ActiveRequests
from pagestream_streams.engine.assignment import Assignment
from pagestream_streams.engine.doorbell import Doorbell
from pagestream_streams.engine.identity import EngineIdentity
from pagestream_streams.protocol.records import Append, AppendOutcome, Claim
from pagestream_streams.scripts import ISOLATE


@dataclass
class _IsolatedRun:
    request_id: str
    start_index: int
    """Length of its log at the claim. The suspicion ends with the next entry."""
    has_passed: bool = False


class Isolation:
    """Keeps an engine from claiming anything beside a suspect until the suspect's log has a new entry."""

    def __init__(
        self,
        broker: Broker,
        identity: EngineIdentity,
        *,
        assignment: Assignment,
        active_requests: ActiveRequests,
        doorbell: Doorbell,
        on_hand_back_all: Callable[[], None] | None,
    ) -> None:
        """`on_hand_back_all`: called when a suspect waits and this engine is to hand back all that it holds."""
        self._broker = broker
        self._identity = identity
        self._assignment = assignment
        self._active_requests = active_requests
        self._doorbell = doorbell
        self._on_hand_back_all = on_hand_back_all
        self._run: _IsolatedRun | None = None

    @property
    def can_make_room(self) -> bool:
        """Whether this engine may be chosen to hand everything back for a suspect, and would then take it."""
        serves = self._on_hand_back_all is not None and not self._assignment.is_retired
        return serves and self._run is None and len(self._active_requests) > 0

    def make_room(self) -> None:
        """Have the engine hand back all that it holds."""
        if self._on_hand_back_all is not None:
            self._on_hand_back_all()

    async def begin(self, claim: Claim) -> None:
        """Publish that this engine runs a suspect isolated. Unavailable.

        Every partition has to know before the request runs, so that this engine's death counts against the suspect and
        not as a sign of a storm of failures.
        """
        # First, so that the next claim withdraws what only some partitions know: the engine does not hold it then.
        self._run = _IsolatedRun(claim.request_id, claim.next_index)
        await self._publish(claim.request_id)

    async def is_running(self) -> bool:
        """Return whether a suspect still has to run isolated; withdraw `begin` when it no longer has. Unavailable."""
        run = self._run
        if run is None:
            return False
        if not run.has_passed and run.request_id in self._active_requests:
            return True
        await self._publish("")
        self._run = None
        return False

    def settle(self, append: Append, outcome: AppendOutcome, *, is_over: bool) -> None:
        """Let the suspect pass once an append has made its log longer. `is_over`: the request ended or was lost."""
        run = self._run
        if run is None or run.request_id != append.request_id or outcome.next_index <= run.start_index:
            return
        if not run.has_passed and not is_over and self._assignment.with_suspects:
            self.make_room()  # the next suspect waits: this one goes on elsewhere, or here behind it
        run.has_passed = True
        self._doorbell.look_again()

    async def _publish(self, request_id: str) -> None:
        partitions = await self._broker.directory.all_partitions(self._identity.model)
        arguments = self._identity.engine_id, request_id
        await self._broker.connection.run_many([Call(ISOLATE, where.prefix, arguments) for where in partitions])
