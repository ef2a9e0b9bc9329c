"""Random kills under continuous load: `make faults-campaign SEED=1 KILLS=1000`.

The results are written to a file after each fault, from which an interrupted campaign resumes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pagestream_streams.fault_points import FaultPoint
from support.faults.cluster import Fault, FaultCluster, FeatureClient, Member, running_cluster, running_harness
from support.faults.fault_points import Pause
from support.faults.feature_clients import StreamBrokenError, clients_of
from support.faults.feature_rows import FEATURE_ROWS

KEPT_FAILURES = 50


@dataclass
class CampaignResults:
    """The results of one campaign."""

    seed: int
    hits: int = 0
    """Faults injected, each into one part or into several at once."""
    kills: int = 0
    """Processes that got a SIGKILL."""
    stops: int = 0
    """Processes that got a SIGSTOP for longer than a lease."""
    cuts: int = 0
    """Parts whose network was cut for longer than a lease."""
    fills: int = 0
    """Times that Redis was at its memory limit for longer than a disconnect grace."""
    requests: int = 0
    tokens: int = 0
    reconnects: int = 0
    lost: int = 0
    """Requests with fewer tokens than undisturbed, or without an end."""
    repeated: int = 0
    """Requests with more tokens, or whose stream contradicted itself."""
    different: int = 0
    """Requests with other tokens, text, log probabilities, usage or finish reason."""
    quarantined: int = 0
    seconds: float = 0.0
    """Seconds under load, over all legs."""
    killed: Counter[str] = field(default_factory=Counter)
    """Kills by part."""
    moments: Counter[str] = field(default_factory=Counter)
    """Faults by fault point; "no moment" where none was reached in time."""
    recovery_s: list[float] = field(default_factory=list)
    """Of each kill: until the last of the open streams continued."""
    failures: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, seed: int) -> Self:
        """Read the results in a file, or start without one. ValueError if the file belongs to another seed."""
        if not path.exists():
            return cls(seed)
        content: dict[str, Any] = json.loads(path.read_text())
        if content["seed"] != seed:
            raise ValueError(f"{path} belongs to seed {content['seed']}, not {seed}")
        for name in ("killed", "moments"):
            content[name] = Counter(content[name])
        return cls(**content)

    def save(self, path: Path) -> None:
        """Replace the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(vars(self), indent=1) + "\n")
        fresh.replace(path)

    def fail(self, kind: str, what: str) -> None:
        """Count a failed request; `kind` is "lost", "repeated" or "different"."""
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.failures) < KEPT_FAILURES:
            self.failures.append(f"{kind}: {what}")

    @property
    def is_clean(self) -> bool:
        """Whether no client noticed a fault."""
        return not (self.lost or self.repeated or self.different or self.quarantined)

    def table(self) -> Iterator[str]:
        """Yield the lines of a Markdown table."""
        yield "| what | count |"
        yield "|---|---|"
        for name in ("kills", "stops", "cuts", "fills", "requests", "tokens", "reconnects"):
            yield f"| {name} | {getattr(self, name):,} |"
        for name in ("lost", "repeated", "different", "quarantined"):
            yield f"| **{name}** | **{getattr(self, name)}** |"
        for share, name in ((0.5, "p50"), (0.99, "p99"), (1.0, "max")):
            yield f"| recovery time {name} | {percentile(self.recovery_s, share):.2f} s |"
        yield f"| time under load | {self.seconds / 60:.0f} min |"
        yield ""
        yield f"Seed {self.seed}. Kills: {_listed(self.killed)}."
        yield f"Faults by moment: {_listed(self.moments)}."


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed; 0.0 without values."""
    return float(np.quantile(values, share, method="higher")) if values else 0.0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


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


ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".fault-campaign"
REPORT_EVERY_KILLS = 10


async def run(results: CampaignResults, state: Path, *, kills: int, minutes: float, streams: int, storm: bool) -> None:
    """Run until the results have `kills` kills, or `minutes` are over."""
    reported = results.kills

    def save() -> None:
        nonlocal reported
        results.save(state)
        if results.kills >= reported + REPORT_EVERY_KILLS:
            reported = results.kills
            wrong = results.lost + results.repeated + results.different + results.quarantined
            rate = 60 * results.kills / results.seconds
            counts = f"{results.requests} requests, {results.tokens} tokens, {wrong} wrong"
            print(f"{results.kills} kills ({rate:.0f}/min), {counts}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        async with (
            running_harness(Path(folder)) as harness,
            running_cluster(Path(folder) / "cluster", harness) as cluster,
        ):
            campaign = Campaign(cluster, results, streams=streams, storm=storm, save=save)
            await campaign.run(kills, time.monotonic() + 60 * minutes)


def main() -> int:
    """Run the command. Returns 1 if a client noticed a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=1000, help="in total, with those of earlier legs")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end this leg after this time")
    parser.add_argument("--streams", type=int, default=16, help="requests that run at any time")
    parser.add_argument("--storm", action="store_true", help="hit again while a killed engine still loads")
    parser.add_argument("--state", type=Path, help="default: .fault-campaign/SEED.json")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to it")
    arguments = parser.parse_args()
    # SIGINT may be ignored by the shell, and a job's limit sends SIGTERM: either has to end the parts in order.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    state = arguments.state or STATE / f"{arguments.seed}.json"
    results = CampaignResults.load(state, arguments.seed)
    try:
        options = {name: getattr(arguments, name) for name in ("kills", "minutes", "streams", "storm")}
        asyncio.run(run(results, state, **options))
    except KeyboardInterrupt:
        print("interrupted: run the same command again to resume")
    finally:
        results.save(state)
        lines = "\n".join(results.table())
        print(f"\n{lines}")
        for failure in results.failures:
            print(failure)
    if arguments.markdown is not None:
        arguments.markdown.write_text(f"{lines}\n")
    return int(not results.is_clean)


if __name__ == "__main__":
    sys.exit(main())
