"""A storm of kills on virtual time: the real scripts, engines that do what `EngineSession` and the worker do with them.

One partition, two engines that are started again at once, requests of some tokens each. A kill is seen by a supervisor.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

from redis import Redis
from support.protocol.virtual_streams import BELL, PREFIX, VirtualStreams

TICK_MS = 50
STEP_MS = 100
PREFILL_MS = 300
BEAT_MS = SWEEP_MS = 300
LEASE, CONTROL, WINDOW, GAP, PATIENCE = 1500, 6000, 30_000, 900, 1000
BATCH = 16
RESTART_MS = 200
MEAN_LIFE_MS = 400
CHOSEN = 2
RUN_ID = "abc"


@dataclass
class Running:
    """One claimed request."""

    epoch: int
    nonce: str
    index: int
    ready_at: int
    alone: bool


@dataclass
class Engine:
    """An engine process that is killed and restarted."""

    name: str
    life: int = 0
    starts_at: int = 0
    dies_at: int = 0
    beats_at: int = 0
    runs: dict[str, Running] = field(default_factory=dict)
    with_suspects: bool = False

    @property
    def id(self) -> str:
        """Id of the current process."""
        return f"{self.name}:{self.life}"


@dataclass(frozen=True)
class Outcome:
    """What a storm left, and how long the recovery took. Times are seconds since the storm's end."""

    kills: int
    suspects_at_end: int  # in their set or waiting for a verdict
    last_suspect_s: float  # until none of them waits, each having got a token
    all_finished_s: float
    trials_after: int
    poisoned: int  # requests that a sweep named as poison


class Storm:
    """One history for each seed. Without `chains_trials` engines keep a suspect that passed, as they once did."""

    def __init__(
        self,
        client: Redis,
        seed: int,
        *,
        requests: int = 100,
        tokens: int = 30,
        chains_trials: bool = True,
        broken: Mapping[str, str] | None = None,
    ) -> None:
        self.client, self.chance, self.tokens, self.chains = client, random.Random(seed), tokens, chains_trials
        self.streams = VirtualStreams(client, broken)
        self.now = 1_000_000
        self.engines = [Engine("a"), Engine("b")]
        self.requests = [f"r{number}" for number in range(requests)]
        self.finished: set[str] = set()
        self.got_token: set[str] = set()
        self.kills = self.trials = self.nonces = 0
        self.poisoned: list[str] = []
        self.is_stormy = True
        for request in self.requests:
            self.call(
                "accept", request, "spec", "t", 1, 10, 1, 0, 60_000, 1, "", LEASE, 10_000, 10**9, BELL, 0, 1, 100, 1
            )

    def call(self, script: str, *arguments: object) -> Any:
        """Run a script now and return its reply."""
        return self.streams.run(script, arguments, self.now, RUN_ID)

    def run(self, storm_ms: int, limit_ms: int) -> Outcome:
        """Run the storm, then a calm until all requests have ended or the limit is reached."""
        end = self.now + storm_ms
        while self.now < end:
            self._tick()
        self.is_stormy = False
        waiting, self.trials = self._waiting(), 0
        self.got_token.clear()
        last = finished = float("inf")
        while self.now < end + limit_ms and finished == float("inf"):
            self._tick()
            if last == float("inf") and waiting <= self.got_token and not self._waiting():
                last = (self.now - end) / 1000
            if len(self.finished) == len(self.requests):
                finished = (self.now - end) / 1000
        return Outcome(self.kills, len(waiting), last, finished, self.trials, len(self.poisoned))

    def _waiting(self) -> set[str]:
        found = [self.client.zrange(PREFIX + key, 0, -1) for key in ("suspects", "verdicts")]
        return {each.decode() for each in chain.from_iterable(cast(list[list[bytes]], found))}

    def _tick(self) -> None:
        self.now += TICK_MS
        self.streams.expire(self.now)
        if self.now % SWEEP_MS == 0:
            *_, poison, _, _ = self.call("sweep", SWEEP_MS // 2, GAP, LEASE, LEASE, 128, CONTROL, WINDOW, 0)
            self.poisoned += [str(each) for each in poison]
        for engine in self.engines:
            self._live(engine)

    def _live(self, engine: Engine) -> None:
        if self.now < engine.starts_at:
            return
        if engine.dies_at == 0:
            engine.life, engine.beats_at = engine.life + 1, self.now
            engine.dies_at = self.now + max(TICK_MS, int(self.chance.expovariate(1 / MEAN_LIFE_MS)))
        if self.is_stormy and self.now >= engine.dies_at:
            self.call("expire", engine.id, BELL, 0, CONTROL)
            engine.runs.clear()
            engine.dies_at, engine.starts_at, engine.with_suspects = 0, self.now + RESTART_MS, False
            self.kills += 1
            return
        if self.now >= engine.beats_at:
            self._beat(engine)
        if self.now % STEP_MS == 0:
            self._step(engine)
        self._claim(engine)

    def _beat(self, engine: Engine) -> None:
        engine.beats_at = self.now + BEAT_MS
        alone = any(run.alone for run in engine.runs.values())
        can = int(bool(engine.runs) and not alone)
        _, wanted, _ = self.call("heartbeat", engine.id, LEASE, can, PATIENCE, CONTROL, "", 0)
        engine.with_suspects = wanted != 0
        if wanted == CHOSEN:
            self._hand_back(engine)

    def _hand_back(self, engine: Engine) -> None:
        triples = [value for request, run in engine.runs.items() for value in (request, run.epoch, run.nonce)]
        self.call("hand_back", engine.id, BELL, 0, "stop", CONTROL, *triples)
        engine.runs.clear()

    def _claim(self, engine: Engine) -> None:
        if any(run.alone for run in engine.runs.values()) or len(engine.runs) >= BATCH:
            return
        self.nonces += 1
        nonce, idle = f"n{self.nonces}", int(not engine.runs)
        # Two prompts of 10 tokens are what one step takes.
        limits = min(BATCH - len(engine.runs), 2), 10_000, 0, 30_000, LEASE, 10_000
        _, _, *rows = self.call("claim", engine.id, nonce, *limits, idle, "", 30_000, CONTROL)
        for request, _, epoch, index, _, _, _, alone, *_ in rows:
            engine.runs[request] = Running(epoch, nonce, int(index), self.now + PREFILL_MS, alone == 1)
            self.call("mark", request, epoch, nonce, 1)
            if alone == 1:
                self.client.hset(PREFIX + "alone", engine.id, request)
                self.trials += 1
        if idle and not any(run.alone for run in engine.runs.values()):
            engine.with_suspects = False

    def _step(self, engine: Engine) -> None:
        for request, run in list(engine.runs.items()):
            if self.now < run.ready_at:
                continue
            ends = run.index == self.tokens
            digest = f"{run.index:016x}"
            entry = ("e", "", "stop", "1,1,0", digest, "") if ends else ("t", 0, "1", "x", digest, "")
            values = [request, str(run.epoch), run.nonce, run.index, "", 1, "", *entry]
            [(kind, *_)] = self.call("append", 60_000, json.dumps(values))
            if kind != 0:
                raise AssertionError(f"append answered {kind}")
            self.got_token.add(request)
            run.index += 1
            if ends:
                self.finished.add(request)
                del engine.runs[request]
            if run.alone:
                run.alone = False
                self.client.hdel(PREFIX + "alone", engine.id)
                if self.chains and engine.with_suspects and not ends:
                    self._hand_back(engine)
