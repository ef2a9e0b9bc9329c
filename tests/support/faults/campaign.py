"""A campaign: continuous load of all feature rows, and random hits at random moments, until so many kills are done."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pagestream_streams.fault_points import FaultPoint
from support.clients.stream_clients import StreamBrokenError
from support.faults.cluster import Fault, FaultCluster, FeatureClient, Member
from support.faults.feature_clients import clients_of
from support.faults.feature_rows import FEATURE_ROWS
from support.faults.line import Stop
from support.faults.tally import Tally

MOMENT_LIMIT_S = 1.0
HITS_BETWEEN_CHECKS = 20
QUIET_LIMIT_S = 120.0
FAULTS = {Fault.KILL: 94, Fault.STOP: 3, Fault.CUT: 3}  # stops and cuts take longer than a lease each
GATEWAY_POINTS = frozenset({FaultPoint.ACCEPTED, FaultPoint.FORWARDING})
# The passage that is taken is among so many, few enough that it is reached within the limit.
PASSAGES = {
    FaultPoint.ACCEPTED: 4,
    FaultPoint.QUEUED: 4,
    FaultPoint.CLAIMED: 3,
    FaultPoint.PREFILL: 4,
    FaultPoint.FIRST_TOKEN: 3,
    FaultPoint.MIDDLE: 16,
    FaultPoint.APPENDED: 16,
    FaultPoint.FORWARDING: 32,
    FaultPoint.LAST_TOKEN: 4,
    FaultPoint.FINISH: 4,
    FaultPoint.FINISHED: 4,
}


@dataclass(frozen=True)
class Plan:
    """One hit, wholly decided by the campaign's seed and the hit's number."""

    fault: Fault
    point: FaultPoint
    passage: int
    targets: tuple[str, ...]
    """"standing" is the part that reached the moment."""
    turn: int
    supervised: bool
    """Whether somebody tells Redis that a killed engine is dead, as `pagestream serve` does."""

    @classmethod
    def draw(cls, seed: int, number: int) -> Plan:
        """The hit of that number."""
        chance = random.Random(f"{seed} {number}")
        point = chance.choice(list(FaultPoint))
        targets = chance.choices(
            [
                *(("standing",), ("gateway",), ("redis",), ("engines",)),
                *(("standing", "gateway"), ("standing", "redis"), ("gateway", "redis")),
            ],
            weights=[40, 15, 12, 3, 14, 8, 8],
        )[0]
        return cls(
            fault=chance.choices(list(FAULTS), weights=list(FAULTS.values()))[0],
            point=point,
            passage=chance.randint(1, PASSAGES[point]),
            targets=targets,
            turn=chance.randrange(2),
            supervised=chance.random() < 0.5,
        )


class Campaign:
    """Runs legs of a campaign on a cluster, and counts."""

    def __init__(
        self, cluster: FaultCluster, tally: Tally, *, streams: int, storm: bool, save: Callable[[], None]
    ) -> None:
        """`streams` requests run at any time. In a storm the next hit comes while a killed engine still loads."""
        self._cluster = cluster
        self._tally = tally
        self._streams = streams
        self._is_storm = storm
        self._save = save
        self._is_loading = False
        self._open: set[FeatureClient] = set()
        self._unchecked: list[FeatureClient] = []  # their seed was chosen: compared when it is quiet
        self._hits: list[float] = []
        self._gaps: dict[float, float] = {}  # a kill's moment -> how long the last stream took to go on
        self._kinds = self._endless_kinds()

    async def run(self, kills: int, until: float) -> None:
        """Hit until the tally has so many kills, or until that time (time.monotonic())."""
        while self._tally.kills < kills and time.monotonic() < until:
            await self._leg(kills, until)

    async def _leg(self, kills: int, until: float) -> None:
        started, before = time.monotonic(), self._tally.seconds
        self._is_loading = True
        async with asyncio.TaskGroup() as group:
            for _ in range(self._streams):
                group.create_task(self._load())
            try:
                for _ in range(HITS_BETWEEN_CHECKS):
                    if self._tally.kills >= kills or time.monotonic() > until:
                        break
                    await self._hit(Plan.draw(self._tally.seed, self._tally.hits))
                    self._tally.hits += 1
                    self._tally.seconds = before + time.monotonic() - started
                    self._save()
            finally:
                self._is_loading = False
        self._tally.seconds = before + time.monotonic() - started
        await self._check_quietly()
        self._save()

    # -- load --

    def _endless_kinds(self) -> Iterator[FeatureClient]:
        for turn in itertools.count():
            for place, row in enumerate(FEATURE_ROWS):
                for shift, kind in enumerate(clients_of(row)):
                    yield self._cluster.client(kind, row, first=(turn + place + shift) % len(self._cluster.gateways))

    async def _load(self) -> None:
        while self._is_loading:
            client = next(self._kinds)
            self._open.add(client)
            try:
                await client.run()
            except StreamBrokenError as error:
                self._tally.fail("repeated", str(error))
            except TimeoutError:
                self._tally.fail("lost", f"{client.name} {client.request_id} had no end")
            else:
                await self._take(client)
            finally:
                self._open.discard(client)

    async def _take(self, client: FeatureClient) -> None:
        self._tally.requests += 1
        self._tally.tokens += client.seen.usage[1] if client.seen.usage else 0
        self._tally.reconnects += client.reconnects
        for hit_at in self._hits:
            if (took := client.recovery_s(hit_at)) is not None and client.started_at < hit_at:
                self._gaps[hit_at] = max(self._gaps.get(hit_at, 0.0), took)
        if client.row.seed_is_chosen:
            self._unchecked.append(client)
        else:
            await self._compare(client)

    async def _compare(self, client: FeatureClient) -> None:
        reference = await self._cluster.reference(client)
        differences = client.seen.differences(reference)
        if differences:
            change = client.seen.next_index - reference.next_index
            kind = "lost" if change < 0 else "repeated" if change > 0 else "different"
            self._tally.fail(kind, f"{client.name} {client.request_id}: {'; '.join(differences)}")

    async def _check_quietly(self) -> None:
        """What can be said only while nothing is disturbed."""
        await self._cluster.wait_whole()
        unchecked, self._unchecked = self._unchecked, []
        async with asyncio.timeout(QUIET_LIMIT_S):
            await asyncio.gather(*(self._compare(client) for client in unchecked))
        self._tally.quarantined = await self._cluster.num_quarantined()
        self._tally.recovery_s += self._gaps.values()
        self._gaps.clear()
        self._hits.clear()

    # -- hits --

    async def _hit(self, plan: Plan) -> None:
        cluster, tally = self._cluster, self._tally
        cluster.line.arm({plan.point: plan.passage})
        stop = await self._stop()
        cluster.line.disarm()
        victims = self._victims(plan, stop)
        cluster.hit(plan.fault, victims)
        if plan.fault is Fault.KILL:
            self._hits.append(time.monotonic())
        for standing in [stop, *cluster.line.waiting()]:
            if standing is not None:
                cluster.line.go(standing.pid)
        tally.moments[stop.point if stop else "no moment"] += 1
        names = [victim.name.partition("-")[0] for victim in victims]
        if plan.fault is Fault.KILL:
            tally.kills += len(victims)
            tally.killed.update(names)
        elif plan.fault is Fault.STOP:
            tally.stops += len(victims)
        else:
            tally.cuts += len(victims)
        await cluster.mend(plan.fault, victims, supervised=plan.supervised)
        await cluster.wait_whole(engines=1 if self._is_storm else None)

    async def _stop(self) -> Stop | None:
        try:
            return await self._cluster.line.stop(MOMENT_LIMIT_S)
        except TimeoutError:
            return None

    def _victims(self, plan: Plan, stop: Stop | None) -> list[Member]:
        cluster = self._cluster
        gateway, engine = cluster.gateways[plan.turn], cluster.engines[plan.turn]
        standing = next((member for member in cluster.members if stop and member.pid == stop.pid), engine)
        named = {
            "standing": [standing],
            "gateway": [gateway],
            "redis": [cluster.redis],
            "engines": list(cluster.engines),
        }
        victims = [member for target in plan.targets for member in named[target]]
        return list({member.name: member for member in victims}.values())
