"""A campaign: continuous load of all feature rows, and random faults at random moments, up to a number of kills."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pagestream_streams.fault_points import FaultPoint
from support.clients.stream_clients import StreamBrokenError
from support.faults.campaign_results import CampaignResults
from support.faults.cluster import Fault, FaultCluster, FeatureClient, Member
from support.faults.fault_points import Pause
from support.faults.feature_clients import clients_of
from support.faults.feature_rows import FEATURE_ROWS

PAUSE_LIMIT_S = 1.0
INJECTIONS_BETWEEN_CHECKS = 20
CHECK_LIMIT_S = 120.0
FAULTS = {Fault.KILL: 93, Fault.STOP: 3, Fault.CUT: 3, Fault.FILL: 1}  # weights; all but kills take seconds
# The passage to pause at is drawn from 1 to this number, which is low enough to be reached within PAUSE_LIMIT_S.
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
class Injection:
    """One injection of a fault, determined by the campaign's seed and the injection's number."""

    fault: Fault
    point: FaultPoint
    passage: int
    targets: tuple[str, ...]
    """"paused" is the process at the fault point."""
    instance: int
    """Which of the two gateways and engines."""
    supervised: bool
    """Whether a killed engine's lease is expired at once, as `pagestream serve` does."""

    @classmethod
    def draw(cls, seed: int, number: int) -> Injection:
        """Return the injection with this number."""
        chance = random.Random(f"{seed} {number}")
        point = chance.choice(list(FaultPoint))
        targets = chance.choices(
            [
                *(("paused",), ("gateway",), ("redis",), ("engines",)),
                *(("paused", "gateway"), ("paused", "redis"), ("gateway", "redis")),
            ],
            weights=[40, 15, 12, 3, 14, 8, 8],
        )[0]
        return cls(
            fault=chance.choices(list(FAULTS), weights=list(FAULTS.values()))[0],
            point=point,
            passage=chance.randint(1, PASSAGES[point]),
            targets=targets,
            instance=chance.randrange(2),
            supervised=chance.random() < 0.5,
        )


class Campaign:
    """Runs a campaign in legs, each of which ends with the comparisons that need an undisturbed cluster."""

    def __init__(
        self, cluster: FaultCluster, results: CampaignResults, *, streams: int, storm: bool, save: Callable[[], None]
    ) -> None:
        """`streams` requests run at any time. In a storm the next fault comes while a killed engine still loads."""
        self._cluster = cluster
        self._results = results
        self._streams = streams
        self._is_storm = storm
        self._save = save
        self._is_loading = False
        self._unchecked: list[FeatureClient] = []  # the gateway chose their seed: compared when nothing is disturbed
        self._injected_at: list[float] = []
        self._gaps: dict[float, float] = {}  # time of a kill -> recovery time of the slowest stream
        self._clients = self._next_clients()

    async def run(self, kills: int, until: float) -> None:
        """Inject faults until the results have `kills` kills, or until this time.monotonic()."""
        while self._results.kills < kills and time.monotonic() < until:
            await self._leg(kills, until)

    async def _leg(self, kills: int, until: float) -> None:
        started, before = time.monotonic(), self._results.seconds
        self._is_loading = True
        async with asyncio.TaskGroup() as group:
            for _ in range(self._streams):
                group.create_task(self._run_clients())
            try:
                for _ in range(INJECTIONS_BETWEEN_CHECKS):
                    if self._results.kills >= kills or time.monotonic() > until:
                        break
                    await self._inject(Injection.draw(self._results.seed, self._results.hits))
                    self._results.hits += 1
                    self._results.seconds = before + time.monotonic() - started
                    self._save()
            finally:
                self._is_loading = False
        self._results.seconds = before + time.monotonic() - started
        await self._check_undisturbed()
        self._save()

    # -- load --

    def _next_clients(self) -> Iterator[FeatureClient]:
        for turn in itertools.count():
            for place, row in enumerate(FEATURE_ROWS):
                for shift, kind in enumerate(clients_of(row)):
                    yield self._cluster.client(kind, row, first=(turn + place + shift) % len(self._cluster.gateways))

    async def _run_clients(self) -> None:
        while self._is_loading:
            client = next(self._clients)
            try:
                await client.run()
            except StreamBrokenError as error:
                self._results.fail("repeated", str(error))
            except TimeoutError:
                self._results.fail("lost", f"{client.name} {client.request_id} had no end")
            else:
                await self._count(client)

    async def _count(self, client: FeatureClient) -> None:
        self._results.requests += 1
        self._results.tokens += client.transcript.usage[1] if client.transcript.usage else 0
        self._results.reconnects += client.reconnects
        for injected_at in self._injected_at:
            if (took := client.recovery_s(injected_at)) is not None and client.started_at < injected_at:
                self._gaps[injected_at] = max(self._gaps.get(injected_at, 0.0), took)
        if client.row.seed_is_chosen:
            self._unchecked.append(client)
        else:
            await self._compare(client)

    async def _compare(self, client: FeatureClient) -> None:
        reference = await self._cluster.reference(client)
        differences = client.transcript.differences(reference)
        if differences:
            change = client.transcript.next_index - reference.next_index
            kind = "lost" if change < 0 else "repeated" if change > 0 else "different"
            self._results.fail(kind, f"{client.name} {client.request_id}: {'; '.join(differences)}")

    async def _check_undisturbed(self) -> None:
        """Compare streams whose reference has to run now, and count quarantined requests."""
        await self._cluster.wait_ready()
        unchecked, self._unchecked = self._unchecked, []
        async with asyncio.timeout(CHECK_LIMIT_S):
            await asyncio.gather(*(self._compare(client) for client in unchecked))
        self._results.quarantined = await self._cluster.num_quarantined()
        self._results.recovery_s += self._gaps.values()
        self._gaps.clear()
        self._injected_at.clear()

    # -- faults --

    async def _inject(self, injection: Injection) -> None:
        cluster, results = self._cluster, self._results
        cluster.fault_points.arm({injection.point: injection.passage})
        pause = await self._next_pause()
        cluster.fault_points.disarm()
        victims = [cluster.redis] if injection.fault is Fault.FILL else self._victims(injection, pause)
        cluster.inject(injection.fault, victims)
        if injection.fault is Fault.KILL:
            self._injected_at.append(time.monotonic())
        for paused in [pause, *cluster.fault_points.take_pauses()]:
            if paused is not None:
                cluster.fault_points.resume(paused.pid)
        results.moments[pause.point if pause else "no moment"] += 1
        names = [victim.name.partition("-")[0] for victim in victims]
        if injection.fault is Fault.KILL:
            results.kills += len(victims)
            results.killed.update(names)
        elif injection.fault is Fault.STOP:
            results.stops += len(victims)
        elif injection.fault is Fault.FILL:
            results.fills += 1
        else:
            results.cuts += len(victims)
        await cluster.repair(injection.fault, victims, supervised=injection.supervised)
        await cluster.wait_ready(engines=1 if self._is_storm else None)

    async def _next_pause(self) -> Pause | None:
        try:
            return await self._cluster.fault_points.next_pause(PAUSE_LIMIT_S)
        except TimeoutError:
            return None

    def _victims(self, injection: Injection, pause: Pause | None) -> list[Member]:
        cluster = self._cluster
        gateway, engine = cluster.gateways[injection.instance], cluster.engines[injection.instance]
        paused = (cluster.member_of(pause.pid) if pause else None) or engine
        named = {
            "paused": [paused],
            "gateway": [gateway],
            "redis": [cluster.redis],
            "engines": list(cluster.engines),
        }
        victims = [member for target in injection.targets for member in named[target]]
        return list({member.name: member for member in victims}.values())
