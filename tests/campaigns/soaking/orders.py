"""Pools, and what is ordered of them at random."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from support.kubernetes.control_plane import ControlPlane, Object, Refused
from support.kubernetes.operator_process import PoolWorld
from support.telemetry.otlp_messages import export, gauge, resource

ORDER = "soak.example/order"
"""Annotation of a pod template: the number of the last order that changed the pool."""
HOME = "soak"
"""Namespace of the operator's lease, and of some pools. Others live in namespaces that come and go."""
RELEASE = f"{HOME}.pagestream-operator"
FEWEST, MOST = 3, 7
"""Pools that there are at a time."""
TEAMS = 2
"""Namespaces beside that of the operator."""
MOST_PODS = 4
NAMESPACE_GONE_S = 90.0
"""Seconds in which a namespace has to end: its controller looks after half of the pods' grace period again."""
_BUSY_TOKENS = 10_000_000
_SCALING: dict[str, Any] = {
    "stabilization": {"downSeconds": 3, "downStartups": 0, "watchSeconds": 3},
    "rate": {"upPods": 100, "upPeriodSeconds": 1, "downPods": 100, "downPeriodSeconds": 1},
    "panic": {"windowSeconds": 0, "holdSeconds": 2, "holdStartups": 0},
    "idle": {"afterSeconds": 4},
}
"""Windows of the law that end within a round."""


class Key(NamedTuple):
    """A pool's namespace and name."""

    namespace: str
    name: str


@dataclass
class Wanted:
    """A pool as it was ordered."""

    order: int
    replicas: int | None
    """Where it is pinned; None: it scales with its load."""
    least: int
    most: int
    is_busy: bool = False
    """Whether its queue holds more than all its pods can do; else nothing waits or runs."""

    def accepts(self, replicas: int, decided: int) -> bool:
        """Whether that is the number of replicas to have, where the law has decided on `decided`."""
        if self.replicas is not None:
            return replicas == self.replicas
        if self.is_busy:
            return replicas == self.most
        return replicas == decided and self.least <= replicas <= self.most

    @property
    def settled(self) -> int:
        """The number of replicas in the end, if the load stays."""
        return self.replicas if self.replicas is not None else self.most if self.is_busy else self.least

    def __str__(self) -> str:
        """Say how many pods there should be."""
        if self.replicas is not None:
            return f"{self.replicas}"
        return f"{self.most}, being busy" if self.is_busy else f"what the law says of {self.least} to {self.most}"


class Fleet:
    """The pools, and the orders that have been placed. One thread uses it; `load` may be called from another."""

    def __init__(self, kube: ControlPlane, rng: random.Random) -> None:
        """Create the namespace of the operator."""
        self.kube, self._rng = kube, rng
        self.pools: dict[Key, Wanted] = {}
        self.placed: Counter[str] = Counter()
        self.ending: dict[str, float] = {}
        """Namespaces that were deleted, and when by `time.monotonic`."""
        self._worlds: dict[str, PoolWorld] = {HOME: PoolWorld(kube, HOME)}
        self._numbers = 0
        self._late: deque[Callable[[], object]] = deque()
        self._kinds: dict[str, tuple[int, Callable[[], None]]] = {
            "create": (5, self._create),
            "change": (4, self._change),
            "pin": (4, self._pin),
            "unpin": (2, self._unpin),
            "bounds": (2, self._bound),
            "load": (4, self._load),
            "delete": (2, self._delete),
            "delete in the foreground": (1, self._delete_in_the_foreground),
            "delete the namespace": (1, self._delete_namespace),
            "scale by hand": (1, self._scale_by_hand),
            "delete an object by hand": (1, self._delete_by_hand),
        }

    def prepare(self) -> None:
        """Make namespaces for teams, as many as are missing. Call it while nothing is disturbed."""
        while len(self._worlds) < 1 + TEAMS:
            name = f"team-{self._next()}"
            self._worlds[name] = PoolWorld(self.kube, name)

    def order(self) -> str:
        """Place an order at random; returns its kind. One that can't be placed now is kept for `catch_up`."""
        if len(self.pools) < FEWEST:
            kind = "create"
        else:
            kind = self._rng.choices(list(self._kinds), [weight for weight, _ in self._kinds.values()])[0]
        self._kinds[kind][1]()
        self.placed[kind] += 1
        return kind

    def catch_up(self) -> None:
        """Place the orders that the API server couldn't take."""
        while self._late:
            self._late[0]()
            self._late.popleft()

    def end(self) -> None:
        """Order the end of all pools, and of all namespaces but the operator's."""
        for key in list(self.pools):
            self._forget(key, "Background")
        for namespace in [each for each in self._worlds if each != HOME]:
            self._end_namespace(namespace)
        self.catch_up()

    def load(self, ready_pods: Iterable[Object]) -> ExportMetricsServiceRequest:
        """What all engines, and a gateway, say of the pools' load."""
        now, pools = time.time(), dict(self.pools)
        by_model = {key.name: wanted for key, wanted in pools.items()}
        engines = []
        for pod in ready_pods:
            place, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            pool = (pod["metadata"].get("labels") or {}).get("pagestream.dev/pool", "")
            wanted = pools.get(Key(place, pool))
            if wanted is not None:
                values = {"kv.utilization": 0.9 * wanted.is_busy, "requests.running": 9.0 * wanted.is_busy}
                gauges = [gauge(f"pagestream.{what}", now, value) for what, value in values.items()]
                gauges.append(gauge("pagestream.requests.waiting", now, 0))
                engines.append(resource(gauges, namespace=place, pool=pool, pod=name, instance=name))
        queues = [
            gauge(f"pagestream.queue.{what}", now, value, {"gen_ai.request.model": model})
            for model, wanted in by_model.items()
            for what, value in _queue(wanted).items()
        ]
        return export(*engines, resource(queues, namespace=HOME, instance="gateway-0", release=RELEASE))

    # -- the orders

    def _create(self) -> None:
        if len(self.pools) >= MOST:
            self._change()
            return
        world, number = self._world(), self._next()
        key = Key(world.namespace, f"pool-{number}")
        pinned = self._rng.random() < 0.5
        wanted = Wanted(
            number,
            self._rng.randint(0, MOST_PODS) if pinned else None,
            self._rng.choice([0, 1, 1]),
            MOST_PODS,
            not pinned and self._rng.random() < 0.5,
        )
        self.pools[key] = wanted
        spec: dict[str, Any] = {
            "minReplicas": wanted.least,
            "maxReplicas": wanted.most,
            "scaling": _SCALING,
            "template": {"annotations": {ORDER: str(number)}},
        }
        if pinned:
            spec["replicas"] = wanted.replicas
        self._place(lambda: world.create(key.name, **spec), HTTPStatus.CONFLICT)

    def _change(self) -> None:
        batch = self._rng.choice([16, 32, 64, 128])
        self._merge(self._draw(), {"engine": {"maxNumSeqs": batch}})

    def _pin(self) -> None:
        key = self._draw()
        self.pools[key].replicas = self._rng.randint(0, self.pools[key].most)
        if self._rng.random() < 0.5:
            self._merge(key, {"replicas": self.pools[key].replicas})
        else:  # as `kubectl scale` does
            path, scale = f"{self._path(key)}/scale", {"spec": {"replicas": self.pools[key].replicas}}
            self._place(lambda: self.kube.merge(path, scale))

    def _unpin(self) -> None:
        key = self._draw()
        self.pools[key].replicas = None
        self._merge(key, {"replicas": None})

    def _bound(self) -> None:
        key = self._draw()
        wanted = self.pools[key]
        wanted.least = self._rng.choice([0, 1])
        wanted.most = self._rng.randint(max(1, wanted.replicas or 0), MOST_PODS)
        self._merge(key, {"minReplicas": wanted.least, "maxReplicas": wanted.most})

    def _load(self) -> None:
        wanted = self.pools[self._draw()]
        wanted.is_busy = not wanted.is_busy

    def _delete(self) -> None:
        self._forget(self._draw(), "Background")

    def _delete_in_the_foreground(self) -> None:
        self._forget(self._draw(), "Foreground")

    def _delete_namespace(self) -> None:
        namespace = self._draw().namespace
        if namespace == HOME:
            self._delete()
        else:
            self._end_namespace(namespace)

    def _scale_by_hand(self) -> None:
        key, replicas = self._draw(), self._rng.randint(0, MOST_PODS)
        path = f"/apis/apps/v1/namespaces/{key.namespace}/deployments/{key.name}-engine/scale"
        self._place(lambda: self.kube.merge(path, {"spec": {"replicas": replicas}}), HTTPStatus.NOT_FOUND)

    def _delete_by_hand(self) -> None:
        key = self._draw()
        places = {"deployments": "/apis/apps/v1", "poddisruptionbudgets": "/apis/policy/v1"}
        plural = self._rng.choice(list(places))
        path = f"{places[plural]}/namespaces/{key.namespace}/{plural}/{key.name}-engine"
        self._place(lambda: self.kube.delete(path, propagationPolicy="Background"), HTTPStatus.NOT_FOUND)

    # -- how they are placed

    def _place(self, call: Callable[[], object], *accepted: HTTPStatus) -> None:
        """Make a call that may be made twice, or keep it. `accepted`: refusals that come where it was made before."""

        def make() -> None:
            try:
                call()
            except Refused as error:
                if error.status not in accepted:
                    raise

        if self._late:  # in the order in which they were given
            self._late.append(make)
            return
        try:
            make()
        except OSError:
            self._late.append(make)
        except Refused as error:
            if error.status < HTTPStatus.INTERNAL_SERVER_ERROR and error.status != HTTPStatus.TOO_MANY_REQUESTS:
                raise
            self._late.append(make)

    def _merge(self, key: Key, spec: dict[str, Any]) -> None:
        number = self._next()
        self.pools[key].order = number
        path, changed = self._path(key), {**spec, "template": {"annotations": {ORDER: str(number)}}}
        self._place(lambda: self.kube.merge(path, {"spec": changed}))

    def _forget(self, key: Key, policy: str) -> None:
        del self.pools[key]
        self._place(lambda: self.kube.delete(self._path(key), propagationPolicy=policy), HTTPStatus.NOT_FOUND)

    def _end_namespace(self, namespace: str) -> None:
        del self._worlds[namespace]
        for key in [each for each in self.pools if each.namespace == namespace]:
            del self.pools[key]
        self.ending[namespace] = time.monotonic()
        self._place(
            lambda: self.kube.delete(f"/api/v1/namespaces/{namespace}"), HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT
        )

    def _world(self) -> PoolWorld:
        return self._worlds[self._rng.choice(list(self._worlds))]

    def _path(self, key: Key) -> str:
        return f"/apis/pagestream.dev/v1alpha1/namespaces/{key.namespace}/enginepools/{key.name}"

    def _draw(self) -> Key:
        return self._rng.choice(list(self.pools))

    def _next(self) -> int:
        self._numbers += 1
        return self._numbers


def _queue(wanted: Wanted) -> dict[str, float]:
    return {
        "depth": 9999.0 * wanted.is_busy,
        "tokens": float(_BUSY_TOKENS * wanted.is_busy),
        "age": 1.0 * wanted.is_busy,
        "running": 9.0 * wanted.is_busy,
        "drain_rate": 0.0,
    }
