"""One replica of the operator, assembled from its parts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from pagestream_telemetry.endpoint import Endpoint, Probes
from pagestream_telemetry.process import running_telemetry
from pagestream_telemetry.settings import TelemetrySettings

from pagestream_operator.errors import ApiFailure
from pagestream_operator.handlers import REGISTRY
from pagestream_operator.instruments import export_state, pass_observer
from pagestream_operator.kube.apply import Applier
from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.events import Recorder
from pagestream_operator.kube.lease import Leadership, LeaseSettings
from pagestream_operator.kube.store import ObjectStore
from pagestream_operator.kube.watch import Watcher
from pagestream_operator.manager import Manager, Observer
from pagestream_operator.metrics import (
    MetricsSink,
    MetricsStore,
    PrometheusSettings,
    PrometheusSource,
    SinkAccess,
    SinkAccessSettings,
    SinkSettings,
)
from pagestream_operator.pool.finalizer import release_finalizers
from pagestream_operator.pool.reconciler import Context
from pagestream_operator.settings import Settings

logger = logging.getLogger(__name__)

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
        self._trouble = "starting"

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, then stop in order: the pools, the lease, the watches."""
        variables = self._settings.variables
        metrics = MetricsStore(release=self._settings.release)
        sink = MetricsSink(
            metrics, SinkSettings(host=variables.otlp_host, port=variables.otlp_port), access=self._sink_access()
        )
        with ExitStack() as stack:
            running = stack.enter_context(
                running_telemetry(
                    self._telemetry, service=SERVICE, instance_id=self._settings.identity, environ=self._environ
                )
            )
            async with KubeClient(variables.request_timeout_s) as client, sink:
                context, leadership, watcher, manager = self._assemble(client, metrics, pass_observer(running.registry))
                export_state(running.registry, manager, leadership, client, metrics)
                probes = Probes(lambda: self._health(manager), lambda: self._trouble, running.render)
                endpoint = Endpoint(probes, variables.metrics_host, variables.metrics_port)
                with endpoint:
                    logger.info("started", extra={"metrics_port": endpoint.port, "otlp_port": sink.port})
                    await self._work(stop, context, leadership, watcher, manager)

    def _assemble(
        self, client: KubeClient, metrics: MetricsStore, on_pass: Observer
    ) -> tuple[Context, Leadership, Watcher, Manager]:
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
        leadership = Leadership(client, lease, self._settings.identity, on_change=lambda _: manager.wake_all())
        watcher = Watcher(client, store, self._settings.namespaces, REGISTRY, resync_s=variables.resync_s)
        context = Context(
            client=client,
            store=store,
            leadership=leadership,
            applier=Applier(client, store, leadership),
            recorder=Recorder(client, leadership),
            metrics=metrics,
            defaults=self._settings.engine,
            status_s=variables.status_s,
            suspect=watcher.suspect,
        )
        manager = Manager(context, decide_s=variables.decide_s, on_pass=on_pass)
        return context, leadership, watcher, manager

    async def _work(
        self, stop: asyncio.Event, context: Context, leadership: Leadership, watcher: Watcher, manager: Manager
    ) -> None:
        stop_leading, stop_watching = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            if self._settings.variables.prometheus_url:
                source = PrometheusSource(context.metrics, self._prometheus())
                group.create_task(source.run(stop_watching), name="prometheus")
            beating = group.create_task(self._keep_beating(watcher), name="heartbeat")
            group.create_task(watcher.run(stop_watching), name="watcher")
            leading = group.create_task(leadership.run(stop_leading), name="leadership")
            working = group.create_task(self._work_when_synced(stop, watcher, manager), name="manager")
            await working
            self._trouble = "stopping"
            try:
                async with asyncio.timeout(self._settings.variables.shutdown_s / 2):
                    await release_finalizers(context.client, context.store, self._settings.release)
            except (TimeoutError, ApiFailure) as error:
                logger.warning("can't release finalizers: %s", error)
            stop_leading.set()
            await leading
            stop_watching.set()
            beating.cancel()

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

    async def _work_when_synced(self, stop: asyncio.Event, watcher: Watcher, manager: Manager) -> None:
        """Run the manager once all kinds were listed: before that, existing objects look as if they were missing."""
        synced, stopped = asyncio.create_task(watcher.synced.wait()), asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({synced, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            synced.cancel()
            stopped.cancel()
        if not stop.is_set():
            await manager.run(stop)

    async def _keep_beating(self, watcher: Watcher) -> None:
        while True:
            self._beat = time.monotonic()
            if self._trouble == "starting" and watcher.defined.is_set():
                self._trouble = ""
            await asyncio.sleep(_BEAT_S)

    def _health(self, manager: Manager) -> str:
        silent = time.monotonic() - self._beat
        if silent > _HUNG_S:
            return f"the event loop has not run for {silent:.0f} s"
        if manager.slowest_s > _STUCK_PASS_S:
            return f"a pass over a pool has taken {manager.slowest_s:.0f} s"
        return ""


def _file(path: str) -> Path | None:
    return Path(path) if path else None
