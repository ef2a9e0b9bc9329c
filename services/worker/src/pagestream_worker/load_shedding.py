"""Load shedding: what an engine gives up, rung by rung, while KV blocks, host memory or Redis' memory are short.

First the law, which knows no clock and does nothing: `Ladder`, from shares of memory in use to the rung in force, three
of them in `Ladders`, and `effects_at`, what each rung means. Then its readings (`host_share`) and its settings, the
group DEGRADATION. Last `Degradation`, which reads what is in use and puts the rungs into force.

The settings of a process import this module: it loads no engine until a rung comes into force.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pagestream_streams.errors import Unavailable
from pagestream_streams.tasks import Periodic, within
from pagestream_telemetry.environment import fields_of, out_of_range, read_environment

if TYPE_CHECKING:
    from pagestream_streams import EngineSession

    from pagestream_worker.claim_budget import ClaimBudget
    from pagestream_worker.engine_core import EngineCore
    from pagestream_worker.requests import ActiveRequests
    from pagestream_worker.telemetry import WorkerTelemetry


class Resource(Enum):
    """What may be short."""

    DEVICE = "device"
    """KV blocks."""
    HOST = "host"
    """Memory of the machine, or of the container."""
    REDIS = "redis"
    """Memory of the fullest Redis server."""


class Rung(IntEnum):
    """What is given up; each rung keeps what those below it do."""

    NORMAL = 0
    NO_PREFETCH = 1
    """Claim nothing before the prompts claimed last are computed."""
    SMALL_CACHE = 2
    """Save no evicted blocks to host memory, and keep few acknowledged log entries."""
    SMALL_BATCH = 3
    """Run fewer sequences at once."""
    LEAVE_CLASS_2 = 4
    """Claim no new requests of class 2."""
    REFUSE_CLASS_2 = 5
    """Ask gateways to refuse them."""
    LEAVE_CLASS_1 = 6
    REFUSE_CLASS_1 = 7


TOP = max(Rung)
BETWEEN_MARKS = 4
"""So many times as long as below the low marks each rung down takes between the marks."""
Shares = Mapping[Resource, float | None]
"""Used / all of each resource; None: unknown now."""


@dataclass(frozen=True)
class Watermarks:
    """Shares between which it recovers slowly."""

    high: float
    """Above it the resource is short."""
    low: float
    """Below it there is enough."""


@dataclass(frozen=True)
class Pace:
    """How fast rungs follow each other."""

    climb_s: float
    """Seconds of shortage for each rung up."""
    descend_s: float
    """Seconds without shortage for each rung down."""
    longest_gap_s: float
    """Most seconds that one update counts for: of a process that was stopped meanwhile, no more is known."""


class Ladder:
    """Climbs while some resource is above its high watermark, and descends while none is.

    A level follows the time of both: one up in each `climb_s`; one down in each `descend_s` while all are below their
    low watermarks, and at a quarter of that pace while some are between, so that no rung stays for ever. The rung
    follows the level with a play of one, so that it turns back only after a whole level in the other direction: noise
    around a watermark never moves it to and fro. Both rise with the shares: with more in use at each moment, no rung is
    ever lower; nor is it with more resources watched.

    An update moves by at most one rung.

    Args:
        marks: of each resource that is watched.
        pace: with a gap below `climb_s` and `descend_s`.
    """

    def __init__(self, marks: Mapping[Resource, Watermarks], pace: Pace) -> None:
        self._marks = marks
        self._pace = pace
        self._level = 0.0
        self.rung = Rung.NORMAL

    def update(self, shares: Shares, elapsed_s: float) -> Rung:
        """Return the rung after so many seconds with these shares."""
        seconds = min(elapsed_s, self._pace.longest_gap_s)
        if self.short(shares):
            self._level = min(float(TOP), self._level + seconds / self._pace.climb_s)
        else:
            self._level = max(0.0, self._level - seconds * self._relief(shares) / self._pace.descend_s)
        self.rung = Rung(max(math.floor(self._level), min(self.rung, math.ceil(self._level))))
        return self.rung

    def short(self, shares: Shares) -> list[Resource]:
        """Return the resources above their high watermark."""
        return [each for each, marks in self._marks.items() if (shares.get(each) or 0.0) > marks.high]

    def _relief(self, shares: Shares) -> float:
        """Return the share of the pace down that counts where nothing is short: none while one is unknown."""
        relief = 1.0
        for each, marks in self._marks.items():
            share = shares.get(each)
            if share is None:
                return 0.0
            if share >= marks.low:
                relief = 1 / BETWEEN_MARKS
        return relief


class Rungs(NamedTuple):
    """Of three ladders, each of which watches more: what gives up work has to free what is short."""

    blocks: Rung
    """For want of KV blocks alone."""
    own: Rung
    """For want of these or the host's memory: all that this engine has."""
    all: Rung
    """For want of anything: the rung that is published."""


class Ladders:
    """The three ladders of an engine.

    Args:
        marks: of each resource.
    """

    def __init__(self, marks: Mapping[Resource, Watermarks], pace: Pace) -> None:
        own = {each: marks[each] for each in (Resource.DEVICE, Resource.HOST)}
        self._blocks = Ladder({Resource.DEVICE: marks[Resource.DEVICE]}, pace)
        self._own = Ladder(own, pace)
        self._all = Ladder(marks, pace)

    @property
    def rung(self) -> Rung:
        """The highest of the three."""
        return self._all.rung

    def update(self, shares: Shares, elapsed_s: float) -> Rungs:
        """Return the rungs after so many seconds with these shares."""
        return Rungs(*(each.update(shares, elapsed_s) for each in (self._blocks, self._own, self._all)))

    def short(self, shares: Shares) -> list[Resource]:
        """Return the resources above their high watermark."""
        return self._all.short(shares)


class Effects(NamedTuple):
    """What is in force at some rungs."""

    claims_ahead: bool
    """Whether prompts are claimed while others are being computed."""
    keeps_cache: bool
    """Whether evicted blocks are saved to host memory, and acknowledged log entries are kept in memory."""
    greatest_class: int | None
    """Of the new requests that an engine with others claims; None: all."""
    refused_class: int | None
    """The least class that gateways are asked to refuse; None: none."""


NO_EFFECTS = Effects(claims_ahead=True, keeps_cache=True, greatest_class=None, refused_class=None)


def effects_at(rungs: Rungs) -> Effects:
    """Return the effects of these rungs, with those of the rungs below them.

    A class is left in the queue only for want of the engine's own memory: what waits there fills Redis, and only
    running it frees that.
    """
    greatest = 0 if rungs.own >= Rung.LEAVE_CLASS_1 else 1 if rungs.own >= Rung.LEAVE_CLASS_2 else None
    refused = 1 if rungs.all >= Rung.REFUSE_CLASS_1 else 2 if rungs.all >= Rung.REFUSE_CLASS_2 else None
    return Effects(
        claims_ahead=rungs.all < Rung.NO_PREFETCH,
        keeps_cache=rungs.all < Rung.SMALL_CACHE,
        greatest_class=greatest,
        refused_class=refused,
    )


class BatchLimit:
    """Sequences that may run at once, on the rungs of the ladder that watches blocks.

    Each climb from SMALL_BATCH on, since blocks are still short, takes a quarter of what runs then; half of the limit
    at most is left, and a quarter at least.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._rung = Rung.NORMAL
        self.most = max_num_seqs
        """In force."""

    def update(self, rung: Rung, num_running: int) -> None:
        """Set `most` for a rung, while so many sequences run."""
        before, self._rung = self._rung, rung
        if rung < Rung.SMALL_BATCH:
            self.most = self._max_num_seqs
        elif rung > before:
            lowered = min(self._max_num_seqs // 2, num_running * 3 // 4)
            self.most = max(1, self._max_num_seqs // 4, lowered)


PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def host_share(proc: Path = PROC, cgroup: Path = CGROUP) -> float:
    """Return used / all, in [0, 1]; 0 where the system says nothing of it.

    What the kernel can take back at once, the cache of files above all, is not in use.

    Args:
        proc: with `meminfo`.
        cgroup: of version 2, with `memory.max`, `memory.current` and `memory.stat`; without a limit it does not count.
    """
    return max(_machine_share(proc / "meminfo"), _container_share(cgroup))


def _machine_share(meminfo: Path) -> float:
    fields = _fields(meminfo)
    total, available = fields.get("MemTotal:"), fields.get("MemAvailable:")
    return 0.0 if not total or available is None else 1.0 - available / total


def _container_share(cgroup: Path) -> float:
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if not limit or used is None:
        return 0.0
    fields = _fields(cgroup / "memory.stat")
    files = fields.get("active_file", 0) + fields.get("inactive_file", 0)
    return max(0, used - files) / limit


def _fields(path: Path) -> dict[str, int]:
    """Return the first number of each line by the line's first word; {} where there is no such file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _number(path: Path) -> int | None:
    """Return the number of a one-line file; None where there is none, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


GROUP = "DEGRADATION"


@dataclass(frozen=True)
class DegradationSettings:
    """Watermarks as shares in use, and the pace between rungs."""

    device_high: float = 1.0
    """Share of the KV blocks that sequences hold or, preempted, need again. Memory is short above this, not at it:
    only above 1 does the pool not hold what was admitted; a pool that is full of running sequences is well used."""
    device_low: float = 0.9
    """Share of the KV blocks below which the shortage is over; a lowered batch comes to less."""
    host_high: float = 0.95
    """Share of the machine's or container's memory in use, without the cache of files. The kernel begins to kill
    near 1."""
    host_low: float = 0.9
    """Share of that memory below which the shortage is over."""
    redis_high: float = 0.9
    """Share of maxmemory in use at the fullest server. At 1 it refuses new requests of every class, and tokens wait."""
    redis_low: float = 0.8
    """Share of maxmemory below which the shortage is over."""
    climb_s: float = 5.0
    """Seconds of shortage for each rung up: requests that end in that time may end it."""
    descend_s: float = 10.0
    """Seconds below all low watermarks for each rung down; between the marks four times as many."""
    period_s: float = 1.0
    """Seconds between two readings."""

    @property
    def marks(self) -> Mapping[Resource, Watermarks]:
        """The watermarks by resource."""
        return {
            Resource.DEVICE: Watermarks(self.device_high, self.device_low),
            Resource.HOST: Watermarks(self.host_high, self.host_low),
            Resource.REDIS: Watermarks(self.redis_high, self.redis_low),
        }

    @property
    def pace(self) -> Pace:
        """An update counts for two periods at most."""
        return Pace(self.climb_s, self.descend_s, 2 * self.period_s)


def degradation_settings(environ: Mapping[str, str]) -> DegradationSettings:
    """Read the group's variables.

    Raises:
        VariableError: one is unknown, malformed or out of range.
    """
    settings = DegradationSettings(**read_environment(environ, {GROUP: fields_of(DegradationSettings)})[GROUP])
    for field in fields(settings):
        value = getattr(settings, field.name)
        if not 0 < value < math.inf:
            raise out_of_range(GROUP, field.name, value, "a number above 0")
    for resource, marks in settings.marks.items():
        if marks.low >= marks.high:
            name = f"{resource.value}_low"
            raise out_of_range(GROUP, name, marks.low, f"a number below {resource.value}_high, {marks.high}")
    for name in ("climb_s", "descend_s"):
        if getattr(settings, name) < settings.pace.longest_gap_s:
            expected = f"at least twice period_s, {settings.period_s}"
            raise out_of_range(GROUP, name, getattr(settings, name), expected)
    return settings


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
        from pagestream_engine.wire.worker import SetLimits  # needs the engine

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
