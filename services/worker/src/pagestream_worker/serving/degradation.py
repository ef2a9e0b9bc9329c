"""Reads what is in use, follows the ladder, and puts its rungs into force."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pagestream_streams import EngineSession
from pagestream_streams.errors import Unavailable
from pagestream_streams.tasks import Periodic, within

from pagestream_worker.ladder.effects import NO_EFFECTS, BatchLimit, Effects, Ladders, effects_at
from pagestream_worker.ladder.host_memory import host_share
from pagestream_worker.ladder.ladder import Resource, Rung, Shares
from pagestream_worker.ladder.settings import DegradationSettings
from pagestream_worker.requests.claim_budget import ClaimBudget
from pagestream_worker.serving.active_requests import ActiveRequests
from pagestream_worker.stepping.commands import SetLimits
from pagestream_worker.stepping.engine_core import EngineCore
from pagestream_worker.telemetry import WorkerTelemetry

logger = logging.getLogger(__name__)

HostShare = Callable[[], float]
_ANSWER_S = 2.0
"""Seconds after which Redis' memory counts as unknown."""
_KEPT_SHARE = 8
"""Of what acknowledged log entries may take, one part in so many stays on a small cache."""


class Degradation:
    """The ladders of one engine, between its start and its end.

    Args:
        core: its engine gets the limits of a step.
        max_num_seqs: of the engine, as configured.
        requests: whose kept log entries are a cache.
        kept_log_bytes: most that those take.
        host: reads the share of the host's memory that is in use.
    """

    def __init__(
        self,
        settings: DegradationSettings,
        *,
        core: EngineCore,
        max_num_seqs: int,
        budget: ClaimBudget,
        requests: ActiveRequests,
        kept_log_bytes: int,
        telemetry: WorkerTelemetry,
        host: HostShare = host_share,
    ) -> None:
        self._settings = settings
        self._core = core
        self._batch = BatchLimit(max_num_seqs)
        self._budget = budget
        self._requests = requests
        self._kept_log_bytes = kept_log_bytes
        self._telemetry = telemetry
        self._host = host
        self._ladders = Ladders(settings.marks, settings.pace)
        self._looked_at: float | None = None
        self._effects = NO_EFFECTS
        self.shares: Shares = {}
        """At the last reading."""

    @property
    def rung(self) -> Rung:
        """The rung in force."""
        return self._ladders.rung

    def watch(self, session: EngineSession) -> Periodic:
        """Return the task that reads and acts every `period_s`, once it is started."""
        return Periodic("degradation", self._settings.period_s, lambda: self.look(session))

    async def look(self, session: EngineSession) -> None:
        """Read what is in use, and move by at most one rung."""
        stats = self._core.figures.stats
        self.shares = {
            Resource.DEVICE: stats.kv_demand,
            Resource.HOST: self._host(),
            Resource.REDIS: await _redis_share(session),
        }
        now, before = time.monotonic(), self.rung
        elapsed_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        rungs = self._ladders.update(self.shares, elapsed_s)
        if rungs.all is not before:
            self._note_transition(before, rungs.all)
        most = self._batch.most
        self._batch.update(rungs.blocks, stats.num_running)
        effects = effects_at(rungs)
        if (effects, self._batch.most) != (self._effects, most):
            self._apply(effects, session)
        if not self._effects.keeps_cache:
            self._requests.drop_acknowledged(self._kept_log_bytes // _KEPT_SHARE)

    def _apply(self, effects: Effects, session: EngineSession) -> None:
        self._effects = effects
        self._budget.limit_sequences(self._batch.most)
        self._core.submit(SetLimits(self._batch.most, saves_blocks=effects.keeps_cache))
        self._budget.limit_lookahead(claims_ahead=effects.claims_ahead)
        session.limit_classes(claimed=effects.greatest_class, refused=effects.refused_class)

    def _note_transition(self, before: Rung, rung: Rung) -> None:
        climbs = rung > before
        self._telemetry.moved((rung if climbs else before).name.lower(), "up" if climbs else "down")
        short = [each.value for each in self._ladders.short(self.shares)]
        shares = {each.value: None if share is None else round(share, 3) for each, share in self.shares.items()}
        logger.warning(
            "degraded to %s" if climbs else "recovered to %s",
            rung.name.lower(),
            extra={"rung": int(rung), "short_of": short, "shares": shares},
        )


async def _redis_share(session: EngineSession) -> float | None:
    """Return used / limit of the fullest Redis server, 0 without a limit; None where it does not answer."""
    try:
        async with within(_ANSWER_S, "Redis' memory"):
            return (await session.redis_memory()).share
    except Unavailable as error:
        logger.debug("cannot read Redis' memory: %s", error)
        return None
