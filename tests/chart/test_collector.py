"""The collector's configuration in a real collector: who gets what, and under which names."""

import base64
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from pagestream_operator.metrics import SinkAccess, SinkAccessSettings
from pagestream_telemetry import loopback_host
from support.kubernetes.api import run_tool
from support.kubernetes.chart import CHART, one, render
from support.processes.part import Part
from support.processes.stack import free_port
from support.processes.waiting import LIMIT_S, wait_until
from support.telemetry.collector import collector_binary

pytestmark = pytest.mark.kube


def configuration(folder: Path, *options: str) -> str:
    """The rendered configuration, with the sink's Secret in a folder of this machine instead of its mount."""
    manifests = render(*options)
    text: str = one(manifests, "ConfigMap", "pagestream-collector")["data"]["config.yaml"]
    for manifest in manifests:
        if (manifest["kind"], manifest["metadata"]["name"]) == ("Secret", "pagestream-operator-sink"):
            for name, content in manifest["data"].items():
                (folder / name).write_bytes(base64.b64decode(content))
    return text.replace("/etc/pagestream-sink", str(folder))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--set", "collector.k8sAttributes.enabled=true"),
        ("--set", "operator.replicas=1"),
        ("--set", "operator.sink.secure=false"),
    ],
)
def test_a_collector_takes_the_configuration(options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(configuration(tmp_path, *options))
    run_tool(collector_binary(), "validate", f"--config={file}", environment={"TOKEN": "x"})


def test_a_collector_takes_exporters_by_value(tmp_path: Path) -> None:
    manifests = render("--values", str(CHART / "ci" / "everything.yaml"))
    file = tmp_path / "config.yaml"
    file.write_text(
        one(manifests, "ConfigMap", "llm-collector")["data"]["config.yaml"].replace(
            "/etc/pagestream-sink", str(tmp_path)
        )
    )
    for name in ("token", "ca.crt"):
        (tmp_path / name).write_text("x")
    run_tool(collector_binary(), "validate", f"--config={file}", environment={"TOKEN": "x"})
    pipelines = yaml.safe_load(file.read_text())["service"]["pipelines"]
    assert pipelines["metrics"]["exporters"] == ["prometheus", "otlp_grpc/company"]
    assert pipelines["traces"]["exporters"] == ["otlp_grpc/company"]


class Operator(MetricsServiceServicer):
    """Stands where an operator's sink stands, and keeps what comes with its token."""

    def __init__(self, access: SinkAccess) -> None:
        self.heard: dict[str, set[str]] = {}
        self.port = free_port()
        self.server = grpc.server(ThreadPoolExecutor(1))
        self._access = access
        credentials = access.server_credentials()
        assert credentials is not None
        add_MetricsServiceServicer_to_server(self, self.server)  # type: ignore[no-untyped-call]
        self.server.add_secure_port(f"127.0.0.1:{self.port}", credentials)

    def Export(  # noqa: N802 -- the service's name
        self, request: ExportMetricsServiceRequest, context: grpc.ServicerContext
    ) -> ExportMetricsServiceResponse:
        if not self._access.admits(context.invocation_metadata()):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        for of_resource in request.resource_metrics:
            attributes = {each.key: each.value.string_value for each in of_resource.resource.attributes}
            names = self.heard.setdefault(attributes["service.name"], set())
            names.update(metric.name for scope in of_resource.scope_metrics for metric in scope.metrics)
        return ExportMetricsServiceResponse()


@pytest.fixture
def operators(tmp_path: Path) -> Iterator[list[Operator]]:
    configuration(tmp_path)
    files = SinkAccessSettings(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "token")
    both = [Operator(SinkAccess(files)), Operator(SinkAccess(files))]
    for operator in both:
        operator.server.start()
    yield both
    for operator in both:
        operator.server.stop(None).wait(LIMIT_S)


@pytest.fixture
def collector(operators: list[Operator], tmp_path: Path) -> Iterator[dict[str, int]]:
    """The collector with the chart's own configuration; only the operators' hosts and all ports are this machine's."""
    ports = {name: free_port() for name in ("4317", "4318", "8889", "13133")}
    text = configuration(tmp_path)
    for number, operator in enumerate(operators):
        place = f"pagestream-operator-{number}.pagestream-operator-sink.llm.svc:4317"
        assert place in text
        name = place.removesuffix(":4317")
        text = text.replace(
            f"endpoint: {place}\n    tls:\n",
            f"endpoint: 127.0.0.1:{operator.port}\n    tls:\n      server_name_override: {name}\n",
        )
    text, num_replaced = re.subn(r"(endpoint: ):(\d+)", lambda match: f"{match[1]}:{ports[match[2]]}", text)
    assert num_replaced == len(ports)
    file = tmp_path / "config.yaml"
    file.write_text(text)
    part = Part("otelcol", [collector_binary(), f"--config={file}"], tmp_path / "otelcol.log")
    part.start()
    try:
        wait_until(lambda: is_healthy(ports["13133"]), what="the collector")
        yield ports
    finally:
        part.stop()


def is_healthy(port: int, host: str = "127.0.0.1") -> bool:
    try:
        return httpx.get(f"http://{host}:{port}/").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def report(port: int, service: str, gauge: str, unit: str) -> None:
    """One process' metrics, as the processes here export them."""
    resource = Resource(
        {
            "service.name": service,
            "service.instance.id": f"{service}-0",
            "k8s.namespace.name": "llm",
            "k8s.pod.name": f"{service}-0",
            "pagestream.pool": "demo",
        }
    )
    exporter = OTLPMetricExporter(f"http://127.0.0.1:{port}", insecure=True)
    provider = MeterProvider([PeriodicExportingMetricReader(exporter, 3_600_000)], resource)
    meter = provider.get_meter("tests")
    meter.create_gauge(gauge, unit=unit).set(0.5, {"gen_ai.request.model": "demo"})
    meter.create_histogram("gen_ai.server.time_to_first_token", unit="s").record(0.1)
    meter.create_counter("pagestream.tokens.generated", unit="{token}").add(3)
    meter.create_gauge("pagestream.queue.drain_rate", unit="{token}/s").set(10)
    provider.force_flush(10_000)
    provider.shutdown()


def test_every_operator_hears_of_engines_and_prometheus_of_all(
    collector: dict[str, int], operators: list[Operator]
) -> None:
    report(collector["4317"], "pagestream-engine", "pagestream.kv.utilization", "1")
    assert is_healthy(collector["13133"], "[::1]") or loopback_host() != "::1"
    report(collector["4317"], "pagestream-operator", "pagestream.operator.leader", "1")
    wait_until(lambda: all(operator.heard for operator in operators), what="both operators to hear")
    page = scraped(collector["8889"], "pagestream_operator_leader_ratio")
    for operator in operators:
        assert set(operator.heard) == {"pagestream-engine"}
        assert "pagestream.kv.utilization" in operator.heard["pagestream-engine"]
    line = next(line for line in page.splitlines() if line.startswith("pagestream_kv_utilization_ratio{"))
    for label in (
        'k8s_namespace_name="llm"',
        'k8s_pod_name="pagestream-engine-0"',
        'pagestream_pool="demo"',
        'service_name="pagestream-engine"',
        'gen_ai_request_model="demo"',
    ):
        assert label in line
    assert "gen_ai_server_time_to_first_token_seconds_bucket{" in page
    assert "pagestream_tokens_generated_total{" in page
    assert "pagestream_queue_drain_rate_per_second{" in page


def scraped(port: int, name: str) -> str:
    """The page of the collector's exporter once it has a series of that name."""
    end = time.monotonic() + LIMIT_S
    while True:
        page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        if name in page:
            return page
        assert time.monotonic() < end, f"{name} is not among\n{page}"
        time.sleep(0.1)
