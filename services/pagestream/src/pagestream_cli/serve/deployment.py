"""A running deployment: its supervisor, its serve.json, and the messages about it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from pagestream_cli.datadir import ProcessRecord, ServeRecord, write_record
from pagestream_cli.serve.plan import REDIS, EngineFacts, EngineLogs, Plan
from pagestream_cli.serve.redis import RedisActions, says_torn
from pagestream_cli.serve.report import Reporter, shorten
from pagestream_cli.supervisor import PartSpec, PartState, Supervisor
from pagestream_cli.supervisor.part import Death, PartView

_READY_WORDS = {"redis": "ready (files read)", "engine": "ready (model loaded)"}
_STARTING_WORDS = {"redis": "reads its files", "engine": "loads the model", "gateway": "is starting"}


class Deployment:
    """Start the parts of a plan and keep serve.json up to date.

    Args:
        redis_command: command line of its own Redis; None where another one is used.
        reporter: prints what happens.
        dead_engines: engines that an earlier serve left in Redis. They are expired at the start, so that their requests
            are reclaimed without waiting for a lease.
    """

    def __init__(
        self, plan: Plan, redis_command: Sequence[str] | None, reporter: Reporter, dead_engines: Sequence[str] = ()
    ) -> None:
        self._plan = plan
        self._dead_engines = dead_engines
        self._reporter = reporter
        self._redis = RedisActions(plan.ports.redis_url, reporter.say)
        self._engine_logs = EngineLogs()
        self._started = time.time()
        self._ready = False
        self._is_loaded = False
        self._noted_redis: int | None = None
        """Process id of the Redis whose version the data folder has on record."""
        self._last_lines: dict[str, str] = {}
        """Of each part, until all are ready."""
        self._dead: set[str] = set()
        self._shown: set[str] = set()
        self._standing_by: set[str] = set()
        self._engine_names = frozenset(f"engine-{i}" for i in range(plan.options.engines + plan.options.warm_spares))
        parts = [] if redis_command is None else [plan.redis(redis_command)]
        parts += plan.engines(self._engine_logs)
        parts += plan.gateways()
        self.supervisor = Supervisor(parts, self, num_spares=plan.options.warm_spares)

    @property
    def record(self) -> ServeRecord:
        """The contents of serve.json now."""
        plan = self._plan
        serve = ProcessRecord("serve", os.getpid())
        parts = tuple(
            ProcessRecord(
                view.spec.name, view.pid, view.spec.ports, view.restarts, str(view.spec.log_path), view.is_spare
            )
            for view in self.supervisor.views
        )
        certificate = plan.options.tls_certificate
        return ServeRecord(
            plan.model.name,
            plan.ports.redis_url,
            plan.options.host,
            (serve, *parts),
            self._started,
            tls_certificate=str(certificate.absolute()) if certificate else "",
            adapter="" if plan.model.adapter is None else plan.model.adapter.name,
            ready=self._ready,
        )

    async def run(self) -> None:
        """Keep the parts running until the supervisor is stopped; then stop them in order.

        Raises:
            PartFailedError: a part cannot be started.
        """
        self._plan.options.data_dir.loaded_file.unlink(missing_ok=True)
        for engine in self._dead_engines:
            self._redis.expire(engine)
        try:
            await self.supervisor.run()
        finally:
            await self._redis.close()
            self._plan.options.data_dir.serve_file.unlink(missing_ok=True)
            self._plan.options.data_dir.loaded_file.unlink(missing_ok=True)

    async def wait_ready(self) -> None:
        """Wait until every gateway answers and an engine claims requests; without a limit, as a model may be large."""
        await asyncio.gather(*(self.supervisor.wait_ready(f"gateway-{i}") for i in range(self._plan.options.gateways)))
        engines = [asyncio.create_task(self.supervisor.wait_ready(name)) for name in self._engine_names]
        try:
            await asyncio.wait(engines, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in engines:
                waiting.cancel()
        self._ready = True
        self._write()

    @property
    def engine_facts(self) -> EngineFacts:
        """What engines have said of the model."""
        return self._engine_logs.facts

    @property
    def waiting(self) -> str:
        """What the start waits for, with the last words of the part; empty once it is ready."""
        if self._ready or self.supervisor.stopping:
            return ""
        late = [view for view in self.supervisor.views if view.state not in (PartState.READY, PartState.STANDBY)]
        if not late:
            return ""
        first = min(late, key=lambda view: view.spec.name.startswith("gateway"))  # which wait for the model themselves
        name = first.spec.name
        doing = _STARTING_WORDS.get(name.partition("-")[0], "is starting")
        if first.state is PartState.WAITING:
            doing = "has died and is about to be restarted"
        last = self._last_lines.get(name)
        said = f"; its last words: {shorten(last).text}" if last else ""
        return f"{name}, which {doing}{said} (log: {first.spec.log_path})"

    def changed(self, views: Sequence[PartView]) -> None:
        """Update serve.json after a process started, became ready or ended."""
        for view in views:
            name = view.spec.name
            if name == REDIS and view.state is PartState.READY and view.pid != self._noted_redis:
                self._noted_redis = view.pid
                self._redis.note_server(self._plan.options.data_dir.redis)
            if view.state is PartState.STANDBY and name not in self._standing_by:
                self._standing_by.add(name)
                self._dead.discard(name)
                self._reporter.say(f"{name} stands by")
            elif view.state is PartState.READY and name in self._standing_by:
                self._standing_by.discard(name)
                self._reporter.say(f"{name} takes its place")
            elif view.state is PartState.READY and name in self._dead:
                self._dead.discard(name)
                self._reporter.back(view)
            elif view.state is PartState.READY and not self._ready and name not in self._shown:
                self._shown.add(name)
                self._reporter.phase(f"{name} {_READY_WORDS.get(name.partition('-')[0], 'ready')}")
        if any(view.state is not PartState.ENDED for view in views):
            self._write()

    def died(self, view: PartView, death: Death, restart_delay_s: float) -> None:
        """Report the death of a part; expire it in Redis where it was an engine."""
        self._dead.add(view.spec.name)
        self._standing_by.discard(view.spec.name)
        if (engine_id := self._engine_logs.forget(view.spec.name)) is not None:
            self._redis.expire(engine_id)
        self._reporter.died(view, death, restart_delay_s)

    def line(self, spec: PartSpec, text: str) -> None:
        """Take a line of a part's output."""
        if not self._ready:
            self._last_lines[spec.name] = text
        if spec.name in self._engine_names:
            self._engine_logs.read(spec.name, text)
            if self._engine_logs.claims(spec.name) and not self._is_loaded:
                self._release_gateways()
        elif spec.name == REDIS and says_torn(text):
            self._redis.rewrite()
        self._reporter.line(spec, text)

    def _release_gateways(self) -> None:
        try:
            self._plan.options.data_dir.loaded_file.touch()
        except OSError as error:
            self._reporter.say(f"gateways wait for a file that can't be written, and open no port: {error}")
        else:
            self._is_loaded = True

    def _write(self) -> None:
        try:
            write_record(self._plan.options.data_dir.serve_file, self.record)
        except OSError as error:  # a full disk; the parts continue without it
            self._reporter.say(f"serve.json is not up to date, and is written again with the next change: {error}")
