"""One replica of the operator, assembled from its parts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeAlias

from pagestream_telemetry.endpoint import Endpoint, Probes
from pagestream_telemetry.process import running_telemetry
from pagestream_telemetry.settings import TelemetrySettings

from pagestream_operator.handlers import REGISTRY
from pagestream_operator.instruments import export_sight, export_state, pass_observer
from pagestream_operator.kube.apply import Applier
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.events import Recorder
from pagestream_operator.kube.lease import Leadership, LeaseSettings
from pagestream_operator.kube.store import ObjectStore
from pagestream_operator.kube.watch import Sight
from pagestream_operator.manager import Manager, Observer
from pagestream_operator.metrics import (
    MetricsSink,
    MetricsStore,
    PrometheusSettings,
    PrometheusSource,
    SinkAccess,
    SinkAccessSettings,
    SinkSettings,
    SteadyClock,
)
from pagestream_operator.pool.deletion import Finalizers, Home
from pagestream_operator.pool.ownership import Budgets
from pagestream_operator.pool.reconciler import Context
from pagestream_operator.settings import Settings
from pagestream_operator.supervision import keep_memory_small, sleep_until, supervised, wait_for_stop

logger = logging.getLogger(__name__)

Task: TypeAlias = "asyncio.Task[None]"

SERVICE = "pagestream-operator"
_LEAST_RANGE_S, _SCRAPES_OF_A_RANGE = 15.0, 8
"""What a query of Prometheus covers, so that an answer that is lost costs no increment of a counter."""
_BEAT_S = 1.0
_HUNG_S = 30.0
"""Seconds without a turn of the event loop after which the process counts as hung."""
_STUCK_PASS_S = 120.0
"""Seconds of one pass after which the process counts as hung: every call in a pass has a time limit."""


class App:
    """One replica of the operator. `run` may be called once."""

    def __init__(self, settings: Settings, telemetry: TelemetrySettings, environ: Mapping[str, str]) -> None:
        self._settings, self._telemetry, self._environ = settings, telemetry, environ
        self._beat = time.monotonic()
        self._is_stopping = False
        self._ends: Counter[str] = Counter()

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then stop in order: the pools, the lease, the watches."""
        variables = self._settings.variables
        clock = SteadyClock()
        metrics = MetricsStore(release=self._settings.release, clock=clock)
        sink = MetricsSink(
            metrics, SinkSettings(host=variables.otlp_host, port=variables.otlp_port), access=self._sink_access()
        )
        with ExitStack() as stack:
            running = stack.enter_context(
                running_telemetry(
                    self._telemetry, service=SERVICE, instance_id=self._settings.identity, environ=self._environ
                )
            )
            async with KubeClient(variables.request_timeout_s, clock) as client, sink:
                context, leadership, sight, manager = self._assemble(
                    client, metrics, pass_observer(running.registry), clock
                )
                export_state(running.registry, manager, leadership, client, metrics)
                export_sight(running.registry, sight, self._ends)
                probes = Probes(
                    lambda: self._health(manager, sight),
                    lambda: self._unreadiness(sight),
                    running.render,
                    report=lambda: "\n".join(sight.report()),
                )
                endpoint = Endpoint(probes, variables.metrics_host, variables.metrics_port)
                with endpoint:
                    logger.info("started", extra={"metrics_port": endpoint.port, "otlp_port": sink.port})
                    await self._work(stop, context, leadership, sight, manager)

    def _assemble(
        self, client: KubeClient, metrics: MetricsStore, on_pass: Observer, clock: SteadyClock
    ) -> tuple[Context, Leadership, Sight, Manager]:
        variables = self._settings.variables
        store = ObjectStore(lambda key: manager.wake(key))  # noqa: PLW0108 - the manager is made below
        lease = LeaseSettings(
            variables.pod_namespace,
            variables.lease_name,
            variables.lease_duration_s,
            variables.lease_renew_s,
            variables.lease_margin_s,
            variables.lease_look_s,
        )
        sight = Sight(
            client,
            store,
            self._settings.namespaces,
            REGISTRY,
            resync_s=variables.resync_s,
            watch_s=variables.watch_s,
            on_sight=lambda: manager.wake_all(),  # noqa: PLW0108 - the manager is made below
            ends=self._ends,
        )
        leadership = Leadership(
            client,
            lease,
            self._settings.identity,
            on_change=lambda _: manager.wake_all(),
            sees=lambda: sight.extent,
        )
        context = Context(
            client=client,
            store=store,
            leadership=leadership,
            applier=Applier(client, store, leadership),
            recorder=Recorder(client, leadership),
            metrics=metrics,
            budgets=Budgets(client, store, leadership, time.monotonic),
            defaults=self._settings.engine,
            status_s=variables.status_s,
            suspect=sight.suspect,
            clock=clock,
        )
        manager = Manager(context, decide_s=variables.decide_s, on_pass=on_pass, shows=sight.shows, ends=self._ends)
        return context, leadership, sight, manager

    async def _work(
        self, stop: asyncio.Event, context: Context, leadership: Leadership, sight: Sight, manager: Manager
    ) -> None:
        stop_leading, stop_watching = asyncio.Event(), asyncio.Event()
        tasks: list[Task] = []
        async with asyncio.TaskGroup() as group:

            def begin(name: str, work: Callable[[asyncio.Event], Awaitable[None]], until: asyncio.Event) -> Task:
                run = supervised(name, partial(work, until), until, ends=self._ends)
                tasks.append(group.create_task(run, name=name))
                return tasks[-1]

            if self._settings.variables.prometheus_url:
                begin("prometheus", PrometheusSource(context.metrics, self._prometheus()).run, stop_watching)
            begin("heartbeat", self._keep_beating, stop_watching)
            begin("memory", keep_memory_small, stop_watching)
            begin("watches", sight.run, stop_watching)
            finalizers = self._finalizers(context, sight)
            begin("finalizers", finalizers.run, stop_watching)
            leading = begin("leadership", leadership.run, stop_leading)
            working = begin("pools", manager.run, stop)
            await wait_for_stop(tasks, stop)
            await working
            self._is_stopping = True
            try:
                async with asyncio.timeout(self._settings.variables.shutdown_s / 2):
                    await finalizers.release_at_exit()
            except TimeoutError:
                logger.warning("pools may keep their finalizer: the API server did not answer in time")
            stop_leading.set()
            await leading
            stop_watching.set()

    def _finalizers(self, context: Context, sight: Sight) -> Finalizers:
        variables = self._settings.variables
        return Finalizers(
            context.client,
            context.store,
            context.leadership,
            context.recorder,
            self._settings.release,
            self._settings.namespaces,
            Home(variables.pod_namespace, variables.lease_name, variables.stateful_set),
            sight.shows,
        )

    def _sink_access(self) -> SinkAccess:
        variables = self._settings.variables
        return SinkAccess(
            SinkAccessSettings(
                certificate_file=_file(variables.otlp_certificate_file),
                key_file=_file(variables.otlp_key_file),
                token_file=_file(variables.otlp_token_file),
            )
        )

    def _prometheus(self) -> PrometheusSettings:
        variables = self._settings.variables
        return PrometheusSettings(
            url=variables.prometheus_url,
            bearer_token_file=_file(variables.prometheus_token_file),
            ca_file=_file(variables.prometheus_ca_file),
            interval_s=variables.prometheus_scrape_s,
            range_s=max(_LEAST_RANGE_S, _SCRAPES_OF_A_RANGE * variables.prometheus_scrape_s),
            matchers=variables.prometheus_matchers,
        )

    async def _keep_beating(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            self._beat = time.monotonic()
            await sleep_until(stop, _BEAT_S)

    def _unreadiness(self, sight: Sight) -> str:
        return "stopping" if self._is_stopping else sight.problem()

    def _health(self, manager: Manager, sight: Sight) -> str:
        silent = time.monotonic() - self._beat
        if silent > _HUNG_S:
            return f"the event loop has not run for {silent:.0f} s"
        if manager.slowest_s > _STUCK_PASS_S:
            return f"a pass over a pool has taken {manager.slowest_s:.0f} s"
        return sight.hang()


def _file(path: str) -> Path | None:
    return Path(path) if path else None
