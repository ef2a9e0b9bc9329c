"""The operator's own metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from pagestream_telemetry.catalog import Kind, Metric
from pagestream_telemetry.instruments import Registry

from pagestream_operator.kube.client import KubeClient
from pagestream_operator.kube.lease import Leadership
from pagestream_operator.kube.watch import Sight
from pagestream_operator.manager import Manager
from pagestream_operator.metrics import MetricsStore

_PASSES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_POOL = ("k8s.namespace.name", "pagestream.pool")

RECONCILES = Metric(
    "pagestream.operator.reconciles", Kind.COUNTER, "{pass}", "passes over a pool, by result", ("result",)
)
DURATION = Metric(
    "pagestream.operator.reconcile.duration", Kind.HISTOGRAM, "s", "duration of a pass over a pool", (), _PASSES
)
DESIRED = Metric("pagestream.operator.desired_replicas", Kind.GAUGE, "{pod}", "engines that a pool should have", _POOL)
READY = Metric("pagestream.operator.ready_replicas", Kind.GAUGE, "{pod}", "engines of a pool that are ready", _POOL)
LEADER = Metric("pagestream.operator.leader", Kind.GAUGE, "1", "1 where this replica leads")
SAMPLES = Metric("pagestream.operator.samples", Kind.COUNTER, "{point}", "metric points, by outcome", ("outcome",))
UNREADABLE = Metric(
    "pagestream.operator.unreadable",
    Kind.COUNTER,
    "{object}",
    "objects that were seen and can't be read, or not as a whole, by kind",
    ("kind",),
)
CALLS = Metric(
    "pagestream.operator.api.calls",
    Kind.COUNTER,
    "{call}",
    "calls of the API server, watches not counted",
    ("verb", "code"),
)
WATCH_AGE = Metric(
    "pagestream.operator.watch.age",
    Kind.GAUGE,
    "s",
    "time since the last event, watch or list of a kind",
    ("k8s.namespace.name", "kind"),
)
SEEN = Metric(
    "pagestream.operator.namespace.seen",
    Kind.GAUGE,
    "1",
    "1 where this replica sees a namespace as it is",
    ("k8s.namespace.name",),
)
WATCH_STARTS = Metric(
    "pagestream.operator.watch.starts",
    Kind.COUNTER,
    "{start}",
    "starts of the watches of a namespace",
    ("k8s.namespace.name",),
)
TASK_ENDS = Metric(
    "pagestream.operator.task.ends",
    Kind.COUNTER,
    "{end}",
    "ends of tasks that should run for as long as the process does, and were started again",
    ("task",),
)


def pass_observer(registry: Registry) -> Callable[[str, float], None]:
    """Return a function that records the result and the seconds of a pass."""
    reconciles, duration = registry.number(RECONCILES), registry.distribution(DURATION).series()

    def observe(result: str, seconds: float) -> None:
        reconciles.series(result).add()
        duration.record(seconds)

    return observe


def export_state(
    registry: Registry, manager: Manager, leadership: Leadership, client: KubeClient, metrics: MetricsStore
) -> None:
    """Export what manager, leadership, client and store count, at each collection."""
    desired, ready, leader = registry.number(DESIRED), registry.number(READY), registry.number(LEADER)
    samples, calls, unreadable = registry.number(SAMPLES), registry.number(CALLS), registry.number(UNREADABLE)

    def collect() -> None:
        leads = leadership.is_leading
        leader.series().set(int(leads))
        pools = {key: reconciler for key, reconciler in manager.pools.items() if reconciler.is_served}
        for key, reconciler in pools.items():
            ready.series(*key).set(reconciler.ready)
            # All replicas decide; only the leader's decision is carried out.
            desired.series(*key).set(reconciler.desired if leads else None)
        for instrument in (desired, ready):
            instrument.forget_others({tuple(key) for key in pools})
        for outcome, count in dict(metrics.outcomes).items():
            samples.series(outcome).set(count)
        for kind, count in dict(manager.unreadable).items():
            unreadable.series(kind).set(count)
        for (verb, code), count in dict(client.calls).items():
            calls.series(verb, str(code)).set(count)

    registry.on_collect(collect)


def export_sight(registry: Registry, sight: Sight, ends: Mapping[str, int]) -> None:
    """Export what this replica sees of its namespaces, and the ends of its tasks, at each collection."""
    age, seen, starts = registry.number(WATCH_AGE), registry.number(SEEN), registry.number(WATCH_STARTS)
    task_ends = registry.number(TASK_ENDS)

    def collect() -> None:
        now = time.monotonic()
        for watcher in sight.watchers.values():
            namespace = watcher.namespace or ""
            seen.series(namespace).set(int(watcher.sees))
            starts.series(namespace).set(watcher.num_runs)
            for kind, sign in list(watcher.signs.items()):
                age.series(namespace, kind.name).set(now - sign.at_s)
        for task, count in dict(ends).items():
            task_ends.series(task).set(count)

    registry.on_collect(collect)
