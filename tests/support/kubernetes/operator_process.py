"""The operator as its own process against a real API server, and a namespace with pools to try it on."""

from __future__ import annotations

import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import yaml
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from support.kubernetes.control_plane import ControlPlane, Object, Refused, eventually
from support.kubernetes.pool_objects import pool_body
from support.processes.part import WITH_PARENT, Part
from support.processes.stack import ROOT, free_port
from support.processes.waiting import LIMIT_S
from support.telemetry.otlp_messages import export, gauge, resource

DEFINITION = ROOT / "operator" / "src" / "pagestream_operator" / "crd" / "enginepools.yaml"
QUICK = {"STATUS_S": "1", "RESYNC_S": "0"}
_POOLS = "/apis/pagestream.dev/v1alpha1/namespaces/{namespace}/enginepools"
_PLACES = {
    "deployments": "/apis/apps/v1/namespaces/{namespace}/deployments",
    "jobs": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "statefulsets": "/apis/apps/v1/namespaces/{namespace}/statefulsets",
    "replicasets": "/apis/apps/v1/namespaces/{namespace}/replicasets",
    "poddisruptionbudgets": "/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets",
    "events": "/apis/events.k8s.io/v1/namespaces/{namespace}/events",
    "leases": "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
    "enginepools": _POOLS,
}
_SAMPLE = re.compile(r"^(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)$")


def install_definition(kube: ControlPlane) -> None:
    """Install the definition of EnginePool, and wait until it is served."""
    kube.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", yaml.safe_load(DEFINITION.read_text()))
    eventually(lambda: kube.exists("/apis/pagestream.dev/v1alpha1/enginepools"), "EnginePool is served")


class OperatorProcess(Part):
    """One replica."""

    def __init__(self, name: str, kubeconfig: Path, folder: Path, namespaces: str, settings: Mapping[str, str]) -> None:
        """`settings`: further ones, such as `{"RESYNC_S": "0"}`."""
        self.metrics_port, self.otlp_port = free_port(), free_port()
        given = {
            "NAMESPACES": namespaces,
            "POD_NAME": name,
            "POD_NAMESPACE": namespaces.split(",", maxsplit=1)[0],
            "METRICS_HOST": "127.0.0.1",
            "METRICS_PORT": str(self.metrics_port),
            "OTLP_HOST": "127.0.0.1",
            "OTLP_PORT": str(self.otlp_port),
            **QUICK,
            **settings,
        }
        self._host = given["OTLP_HOST"]
        environment = {f"PAGESTREAM_OPERATOR__{field}": value for field, value in given.items()}
        super().__init__(
            name,
            [*WITH_PARENT, sys.executable, "-m", "pagestream_operator"],
            folder / f"{name}.log",
            {**environment, "KUBECONFIG": str(kubeconfig)},
        )

    def page(self, path: str) -> tuple[int, str]:
        """Status and text of a page of its metrics port."""
        try:
            with urllib.request.urlopen(f"http://{self._host}:{self.metrics_port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def wait_ready(self) -> None:
        """Wait until it is ready."""
        eventually(lambda: self.is_alive() and self.page("/readyz")[0] == 200, f"{self.name} ready")

    def figures(self, name: str) -> dict[str, float]:
        """A metric's values by their labels."""
        found = [_SAMPLE.match(line) for line in self.page("/metrics")[1].splitlines()]
        return {each["labels"] or "": float(each["value"]) for each in found if each and each["name"] == name}

    def leads(self) -> bool:
        """Whether its metrics show that it leads."""
        return self.figures("pagestream_operator_leader_ratio").get("") == 1

    def calls(self) -> float:
        """Calls of the API server so far, watches not counted."""
        return sum(self.figures("pagestream_operator_api_calls_total").values())

    def passes(self) -> float:
        """Passes over pools that went through so far."""
        return self.figures("pagestream_operator_reconciles_total").get('result="ok"', 0.0)

    def export_metrics(self, request: ExportMetricsServiceRequest, *, limit_s: float = LIMIT_S) -> None:
        """Export metrics to it, as a collector does. RpcError after `limit_s`, and where it does not take them."""
        with grpc.insecure_channel(f"{self._host}:{self.otlp_port}") as channel:
            call = channel.unary_unary(
                "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
                request_serializer=ExportMetricsServiceRequest.SerializeToString,
                response_deserializer=ExportMetricsServiceResponse.FromString,
            )
            call(request, timeout=limit_s)


@contextmanager
def started_operator(
    kube: ControlPlane, namespaces: str, name: str = "operator-0", *, kubeconfig: Path | None = None, **settings: str
) -> Iterator[OperatorProcess]:
    """A replica for the length of a block; it may not be ready yet."""
    folder = kube.folder / namespaces.replace(",", "-")
    folder.mkdir(exist_ok=True)
    operator = OperatorProcess(name, kubeconfig or kube.kubeconfig, folder, namespaces, settings)
    operator.start()
    try:
        yield operator
    finally:
        operator.stop()


@contextmanager
def running_operator(
    kube: ControlPlane, namespaces: str, name: str = "operator-0", *, kubeconfig: Path | None = None, **settings: str
) -> Iterator[OperatorProcess]:
    """A replica that is ready, for the length of a block."""
    with started_operator(kube, namespaces, name, kubeconfig=kubeconfig, **settings) as operator:
        operator.wait_ready()
        yield operator


class PoolWorld:
    """A namespace, its pools, and what a kubelet would do about their pods."""

    def __init__(self, kube: ControlPlane, namespace: str) -> None:
        """Create the namespace, which admits only pods of the restricted standard, and a node for them."""
        self.kube, self.namespace = kube, namespace
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        kube.post("/api/v1/namespaces", {"metadata": {"name": namespace, "labels": labels}})
        if not kube.exists("/api/v1/nodes/paper"):
            kube.post("/api/v1/nodes", {"metadata": {"name": "paper"}})
        if kube.has_controllers:
            eventually(lambda: kube.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/default"), "an account")

    def path(self, plural: str, name: str = "") -> str:
        """Of an object, or of all of a kind."""
        place = _PLACES.get(plural, f"/api/v1/namespaces/{{namespace}}/{plural}").format(namespace=self.namespace)
        return f"{place}/{name}" if name else place

    def create(self, name: str = "demo", **spec: Any) -> Object:
        """An EnginePool."""
        body = pool_body(name, **{"model": {"source": {"path": "/models/demo"}, "servedName": name}, **spec})
        body["metadata"]["namespace"] = self.namespace
        return self.kube.post(self.path("enginepools"), body)

    def pool(self, name: str = "demo") -> Object:
        """As it is now."""
        return self.kube.get(self.path("enginepools", name))

    def change(self, spec: Mapping[str, Any], name: str = "demo") -> Object:
        """Merge a change into a pool's spec."""
        return self.kube.merge(self.path("enginepools", name), {"spec": spec})

    def deployment(self, name: str = "demo") -> Object:
        """Of a pool; refused where it isn't there."""
        return self.kube.get(self.path("deployments", f"{name}-engine"))

    def config_map(self, name: str = "demo") -> Object:
        """The ConfigMap that a pool's template names; {} while it is missing."""
        sources = self.deployment(name)["spec"]["template"]["spec"]["containers"][0]["envFrom"]
        path = self.path("configmaps", sources[-1]["configMapRef"]["name"])
        return self.kube.get(path) if self.kube.exists(path) else {}

    def lease(self) -> Object:
        """The spec of the operators' lease."""
        found: Object = self.kube.get(self.path("leases", "pagestream-operator"))["spec"]
        return found

    def replicas(self, name: str = "demo") -> int:
        """The Deployment's spec.replicas."""
        found: int = self.deployment(name)["spec"]["replicas"]
        return found

    def wait_replicas(self, count: int, name: str = "demo", limit_s: float = LIMIT_S) -> None:
        """Wait until the Deployment's spec.replicas is `count`."""
        eventually(lambda: self.replicas(name) == count, f"{count} replicas of {name}", limit_s)

    def condition(self, kind: str, name: str = "demo") -> Object:
        """One condition; {} before there is one."""
        conditions = self.pool(name).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == kind), {})

    def wait_condition(self, kind: str, reason: str, name: str = "demo", limit_s: float = LIMIT_S) -> Object:
        """Wait until a condition has a reason."""
        eventually(
            lambda: self.condition(kind, name).get("reason") == reason, f"{kind} of {name} for {reason}", limit_s
        )
        return self.condition(kind, name)

    def pods(self, name: str = "demo") -> list[Object]:
        """A pool's pods, by name."""
        listed = self.kube.get(f"{self.path('pods')}?labelSelector=pagestream.dev/pool={name}")["items"]
        return sorted(listed, key=lambda pod: str(pod["metadata"]["name"]))

    def _active(self, name: str) -> list[Object]:
        return [pod for pod in self.pods(name) if "deletionTimestamp" not in pod["metadata"]]

    def make_ready(self, name: str = "demo", count: int = 1) -> list[str]:
        """Wait for a pool's pods, put them on the node, and have them ready. Returns their names."""
        eventually(lambda: len(self._active(name)) == count, f"{count} pods of {name}")
        for pod in self._active(name):
            place = self.path("pods", pod["metadata"]["name"])
            if "nodeName" not in pod["spec"]:
                binding = {"metadata": {"name": pod["metadata"]["name"]}, "target": {"kind": "Node", "name": "paper"}}
                self.kube.post(f"{place}/binding", binding)
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
            self.kube.merge(f"{place}/status", {"status": {"phase": "Running", "conditions": [ready]}})
        return [pod["metadata"]["name"] for pod in self._active(name)]

    def end_pods(self, name: str = "demo") -> None:
        """What a kubelet does when the containers of ending pods have ended."""
        for pod in self.pods(name):
            if "deletionTimestamp" in pod["metadata"]:
                try:
                    self.kube.delete(self.path("pods", pod["metadata"]["name"]), gracePeriodSeconds=0)
                except Refused as error:
                    if error.status != 404:
                        raise

    def end_job(self, name: str, phase: str, *, exit_code: int = 0, message: str = "") -> None:
        """What a kubelet does when the container of a Job's pod has ended, which has left a message."""
        listed = f"{self.path('pods')}?labelSelector=batch.kubernetes.io/job-name={name}"
        pod = eventually(lambda: next(iter(self.kube.get(listed)["items"]), None), f"a pod of {name}")
        container = pod["spec"]["containers"][0]
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ended = {"exitCode": exit_code, "reason": "Ended", "startedAt": now, "finishedAt": now, "containerID": "x://1"}
        ended |= {"message": message} if message else {}
        of_container = {
            **{"name": container["name"], "image": container["image"], "imageID": ""},
            **{"ready": False, "restartCount": 0, "state": {"terminated": ended}},
        }
        status = {"phase": phase, "containerStatuses": [of_container]}
        self.kube.merge(f"{self.path('pods', pod['metadata']['name'])}/status", {"status": status})

    def ending(self, name: str = "demo") -> list[str]:
        """Names of the pods that are being deleted."""
        return [pod["metadata"]["name"] for pod in self.pods(name) if "deletionTimestamp" in pod["metadata"]]

    def events(self, reason: str) -> list[str]:
        """Notes of the events with a reason, oldest first."""
        found = [event for event in self.kube.get(self.path("events"))["items"] if event["reason"] == reason]
        return [event["note"] for event in sorted(found, key=lambda event: str(event["eventTime"]))]

    def wait_event(self, reason: str, *words: str) -> str:
        """Wait for an event with a reason whose note has all words; returns the newest such note."""

        def found() -> list[str]:
            return [note for note in self.events(reason) if all(word in note for word in words)]

        return eventually(found, f"an event {reason} with {words}")[-1]

    def load(
        self,
        operator: OperatorProcess,
        shares: Mapping[str, float],
        *,
        pool: str = "demo",
        model: str = "",
        waiting: int = 0,
        ahead_s: float = 0.0,
        drain: float = 0,
    ) -> None:
        """Export what engines and a gateway would: KV utilization by pod, the number of requests that wait for a model,
        which is that of the pool's name unless it is given, and the prompt tokens per second that engines claim.

        Args:
            ahead_s: how far the clocks of engines and gateway are ahead of the operator's.
        """
        now, own = time.time() + ahead_s, {"namespace": self.namespace}
        engines = [
            resource(
                [
                    gauge("pagestream.kv.utilization", now, share),
                    gauge("pagestream.requests.running", now, round(10 * share)),
                    gauge("pagestream.requests.waiting", now, 0),
                ],
                **own,
                pool=pool,
                pod=pod,
                instance=pod,
            )
            for pod, share in shares.items()
        ]
        queue = {"depth": waiting, "tokens": 10 * waiting, "age": float(waiting > 0), "running": 0, "drain_rate": drain}
        attributes = {"gen_ai.request.model": model or pool}
        reported = [gauge(f"pagestream.queue.{name}", now, value, attributes) for name, value in queue.items()]
        operator.export_metrics(export(*engines, resource(reported, **own, instance=f"gateway-{ahead_s:g}")))

    def manager_of_replicas(self, name: str = "demo") -> set[str]:
        """Field managers that own the Deployment's replicas."""
        entries = self.deployment(name)["metadata"]["managedFields"]
        return {entry["manager"] for entry in entries if "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})}
