"""The sink over real gRPC: exports by the OpenTelemetry SDK, by hand and through a real collector, whole and broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import grpc
import grpc.aio
import pytest
import yaml
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import AggregationTemporality, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from pagestream_operator import SinkFileInvalid, SinkUnavailable
from pagestream_operator.metrics import (
    MetricsSink,
    MetricsStore,
    PoolMetrics,
    SinkAccess,
    SinkAccessSettings,
    SinkSettings,
)
from pagestream_telemetry import TelemetrySettings, catalog, running_telemetry
from support.clients.gateway_clients import issue_certificate
from support.network.proxy import Proxy
from support.processes.part import Part
from support.processes.stack import free_port
from support.processes.waiting import LIMIT_S, until, wait_until
from support.telemetry.collector import collector_binary
from support.telemetry.otlp_messages import engine, export, gateway, gauge, histogram, total

# -- The sink over real gRPC: exports by the OpenTelemetry SDK and by hand, whole and broken


pytestmark = pytest.mark.served
LOCAL = SinkSettings(host="127.0.0.1", port=0)
EXPORT = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
CUMULATIVE: dict[type, AggregationTemporality] = {}
DELTA = {Counter: AggregationTemporality.DELTA, Histogram: AggregationTemporality.DELTA}
RESOURCE = {
    "service.name": "pagestream-engine",
    "service.instance.id": "pod-0",
    "k8s.namespace.name": "ns",
    "k8s.pod.name": "pod-0",
    "k8s.pod.uid": "uid-0",
    "pagestream.pool": "demo",
}


@pytest.fixture
async def sink() -> AsyncIterator[tuple[MetricsSink, MetricsStore]]:
    store = MetricsStore()
    async with MetricsSink(store, LOCAL) as listening:
        yield listening, store


def provider_for(port: int, temporality: dict[type, AggregationTemporality], **more: object) -> MeterProvider:
    """The SDK as a process would set it up, exporting only when flushed."""
    exporter = OTLPMetricExporter(
        endpoint=f"http://127.0.0.1:{port}",
        insecure=True,
        preferred_temporality=temporality,
        compression=grpc.Compression.Gzip,
    )
    reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
    return MeterProvider([reader], resource=Resource.create(RESOURCE | more))


@pytest.mark.parametrize("temporality", [CUMULATIVE, DELTA], ids=["cumulative", "delta"])
async def test_the_sdk_s_metrics_arrive(
    sink: tuple[MetricsSink, MetricsStore], temporality: dict[type, AggregationTemporality]
) -> None:
    listening, store = sink
    utilization = [0.25]

    def observed(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(utilization[0], {"gen_ai.request.model": "demo"})]

    def run() -> None:
        provider = provider_for(listening.port, temporality)
        meter = provider.get_meter("test")
        meter.create_observable_gauge("pagestream.kv.utilization", [observed])
        meter.create_gauge("pagestream.requests.running").set(4)
        meter.create_up_down_counter("pagestream.requests.waiting").add(2)
        for name in ("queue.tokens", "queue.running", "queue.drain_rate"):
            meter.create_gauge(f"pagestream.{name}").set(7, {"gen_ai.request.model": "demo"})
        prompt = meter.create_counter("pagestream.tokens.prompt")
        first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token", explicit_bucket_boundaries_advisory=[0.5, 1.0, 2.0]
        )
        for value in (0.1, 0.7, 5.0):
            prompt.add(100)
            first_token.record(value, {"gen_ai.request.model": "demo", "gen_ai.operation.name": "chat"})
            provider.force_flush()
        utilization[0] = 0.75
        provider.shutdown()

    began = time.time()
    await asyncio.to_thread(run)
    seen = store.observe(namespace="ns", pool="demo", model="demo", pods=["pod-0"])
    sample = seen.samples["pod-0"]
    assert (sample.kv_utilization, sample.running, sample.waiting) == (0.75, 4, 2)
    assert began - 1 <= sample.time_s <= time.time() + 1
    assert sample.prompt_tokens_per_s is not None
    assert sample.prompt_tokens_per_s > 0
    assert seen.queue is not None
    assert (seen.queue.tokens, seen.queue.running, seen.queue.drain_tokens_per_s) == (7, 7, 7)
    assert seen.ttft is not None
    assert (seen.ttft.bounds_s, seen.ttft.counts) == ((0.5, 1.0, 2.0), (1, 1, 0, 1))
    assert set(store.outcomes) <= {"accepted", "unknown"}


async def call(
    listening: MetricsSink, body: bytes, compression: grpc.Compression | None = None, *, waits: bool = False
) -> bytes:
    """Export. `waits`: try again while nobody listens, as channels of a process share what they know of an address."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{listening.port}") as channel:
        answer: bytes = await channel.unary_unary(EXPORT)(
            body, compression=compression, wait_for_ready=waits, timeout=LIMIT_S
        )
        return answer


async def test_the_generated_stub_gets_an_answer_with_what_was_refused(sink: tuple[MetricsSink, MetricsStore]) -> None:
    listening, _ = sink
    now = time.time()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{listening.port}") as channel:
        stub = MetricsServiceStub(channel)
        whole = await stub.Export(export(engine(now), gateway(now)))
        assert whole == ExportMetricsServiceResponse()
        wrong = export(engine(now + 1, gauge("pagestream.tokens.prompt", now, 1)), engine(now + 900))
        partial = (await stub.Export(wrong)).partial_success
    assert partial.rejected_data_points == 4
    assert partial.error_message == "3 from the future, 1 of pagestream.tokens.prompt as gauge"


@pytest.mark.parametrize("body", [b"\xff\xff\xff", b"\x0a\xff\x01", b"\x0a\x02\x0a\x7f", bytes(range(256))])
async def test_what_is_malformed_is_refused_and_harms_nothing(
    sink: tuple[MetricsSink, MetricsStore], body: bytes
) -> None:
    listening, store = sink
    await call(listening, export(engine(time.time())).SerializeToString())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(listening, body)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await call(listening, export(engine(time.time(), pod="pod-1")).SerializeToString())
    seen = store.observe(namespace="ns", pool="demo", model="demo", pods=["pod-0", "pod-1"]).samples
    assert set(seen) == {"pod-0", "pod-1"}
    assert store.outcomes["malformed"] == 1


async def test_a_truncated_export_never_raises(sink: tuple[MetricsSink, MetricsStore]) -> None:
    listening, _ = sink
    whole = export(engine(time.time(), total("pagestream.tokens.prompt", 1, 2, 3))).SerializeToString()
    codes = set()
    for length in range(0, len(whole), 7):
        try:
            await call(listening, whole[:length])
        except grpc.aio.AioRpcError as error:
            codes.add(error.code())
    assert codes <= {grpc.StatusCode.INVALID_ARGUMENT}


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip])
async def test_large_exports_are_refused_even_if_they_were_packed_small(compression: grpc.Compression | None) -> None:
    store = MetricsStore()
    async with MetricsSink(store, SinkSettings(host="127.0.0.1", port=0, max_message_bytes=100_000)) as listening:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(listening, bytes(10_000_000), compression)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await call(listening, export(engine(time.time())).SerializeToString(), compression)
    assert store.observe(namespace="ns", pool="demo", model="", pods=["pod-0"]).samples


async def test_one_export_may_hold_thousand_pods(sink: tuple[MetricsSink, MetricsStore]) -> None:
    listening, store = sink
    pods = [f"pod-{index}" for index in range(1000)]
    await call(listening, export(*(engine(time.time(), pod=pod) for pod in pods)).SerializeToString())
    assert len(store.observe(namespace="ns", pool="demo", model="", pods=pods).samples) == 1000


async def test_an_address_in_use_is_named(sink: tuple[MetricsSink, MetricsStore]) -> None:
    listening, store = sink
    second = MetricsSink(store, SinkSettings(host="127.0.0.1", port=listening.port))
    with pytest.raises(SinkUnavailable, match=rf"127\.0\.0\.1:{listening.port}"):
        await second.start()


async def test_a_stopped_sink_is_gone_and_starts_again() -> None:
    store = MetricsStore()
    listening = MetricsSink(store, LOCAL)
    await listening.start()
    port = listening.port
    await listening.stop()
    await listening.stop()
    with pytest.raises(grpc.aio.AioRpcError):
        await call(listening, ExportMetricsServiceRequest().SerializeToString())
    again = MetricsSink(store, SinkSettings(host="127.0.0.1", port=port))
    async with again:
        await call(again, ExportMetricsServiceRequest().SerializeToString(), waits=True)


async def test_connections_outlive_a_sink_that_restarts(sink: tuple[MetricsSink, MetricsStore]) -> None:
    """An exporter keeps its channel; the next export after a restart arrives."""
    listening, store = sink
    async with grpc.aio.insecure_channel(f"127.0.0.1:{listening.port}") as channel:
        stub = MetricsServiceStub(channel)
        await stub.Export(export(engine(time.time())))
        await listening.stop()
        second = MetricsSink(store, SinkSettings(host="127.0.0.1", port=listening.port))
        async with second:
            await stub.Export(export(engine(time.time(), pod="pod-1")), wait_for_ready=True, timeout=LIMIT_S)
    assert "pod-1" in store.observe(namespace="ns", pool="demo", model="", pods=["pod-1"]).samples


# -- The sink behind TLS and a token: who gets in, and files that are replaced while it runs


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def exported(port: int, *, ca: bytes | None = None, token: str | None = None) -> grpc.StatusCode:
    """The status of one export over a connection of its own."""
    address = f"127.0.0.1:{port}"
    if ca is None:
        channel = grpc.aio.insecure_channel(address)
    else:
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca))
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    async with channel:
        try:
            await MetricsServiceStub(channel).Export(export(engine(time.time())), metadata=metadata, timeout=LIMIT_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_a_sender_needs_tls_and_the_token(tmp_path: Path) -> None:
    certificate, key = issue_certificate(tmp_path, 1)
    (tmp_path / "token").write_text("right\n")
    store = MetricsStore()
    access = SinkAccess(SinkAccessSettings(certificate, key, tmp_path / "token"))
    async with MetricsSink(store, LOCAL, access=access) as sink:
        assert await exported(sink.port, token="right") is grpc.StatusCode.UNAVAILABLE, "plain text"
        assert await exported(sink.port, ca=certificate.read_bytes()) is grpc.StatusCode.UNAUTHENTICATED
        assert await exported(sink.port, ca=certificate.read_bytes(), token="wrong") is grpc.StatusCode.UNAUTHENTICATED
        assert store.observe(namespace="ns", pool="demo", model="demo", pods=["pod-0"]).samples == {}
        assert await exported(sink.port, ca=certificate.read_bytes(), token="right") is grpc.StatusCode.OK
    assert store.outcomes == {"unauthenticated": 2, "accepted": 3}


async def test_a_replaced_certificate_is_used_for_the_next_connection(tmp_path: Path) -> None:
    certificate, key = issue_certificate(tmp_path, 1)
    old = certificate.read_bytes()
    async with MetricsSink(MetricsStore(), LOCAL, access=SinkAccess(SinkAccessSettings(certificate, key))) as sink:
        assert await exported(sink.port, ca=old) is grpc.StatusCode.OK
        key.write_text("half of a key")
        assert await exported(sink.port, ca=old) is grpc.StatusCode.OK, "while the new one is being written"
        issue_certificate(tmp_path, 2)
        assert await exported(sink.port, ca=certificate.read_bytes()) is grpc.StatusCode.OK
        assert await exported(sink.port, ca=old) is grpc.StatusCode.UNAVAILABLE


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "collector"), ("authorization", f"Bearer {token}")]


def test_a_replaced_token_counts_until_its_senders_have_the_new_one(tmp_path: Path) -> None:
    file, clock = tmp_path / "token", Clock()
    file.write_text("old")
    access = SinkAccess(SinkAccessSettings(token_file=file, rotation_s=60), clock=clock)
    assert (access.admits(bearer("old")), access.admits(bearer("new"))) == (True, False)
    file.write_text("new")
    clock.now = 2
    assert (access.admits(bearer("old")), access.admits(bearer("new"))) == (True, True)
    file.unlink()
    clock.now = 30
    assert access.admits(bearer("new")), "a file that is missing for a moment"
    clock.now = 63
    assert (access.admits(bearer("old")), access.admits(bearer("new"))) == (False, True)


@pytest.mark.parametrize("headers", [None, [], [("authorization", "right")], [("authorization", "Basic right")]])
def test_what_is_no_bearer_token_is_refused(tmp_path: Path, headers: list[tuple[str, str | bytes]] | None) -> None:
    (tmp_path / "token").write_text("right")
    assert not SinkAccess(SinkAccessSettings(token_file=tmp_path / "token")).admits(headers)


def test_a_missing_file_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    for settings in (
        SinkAccessSettings(tmp_path / "no.crt", tmp_path / "no.key"),
        SinkAccessSettings(token_file=tmp_path / "none"),
        SinkAccessSettings(token_file=tmp_path / "token"),
    ):
        with pytest.raises(SinkFileInvalid, match=r"no\.key|none|has no token"):
            SinkAccess(settings)


# -- A process whose collector vanishes without closing its connection


async def test_metrics_take_another_connection() -> None:
    """Which a Service leads to a collector that lives: nothing else tells the process that its own is gone."""
    store = MetricsStore()

    def value() -> float | None:
        sample = store.observe(namespace="", pool="", model="", pods=["engine-0"]).samples.get("engine-0")
        return None if sample is None else sample.kv_utilization

    async with MetricsSink(store, LOCAL) as sink, Proxy(sink.port) as network:
        settings = TelemetrySettings(otlp_endpoint=f"http://{network.target}", export_interval_s=0.2, traces=False)
        with running_telemetry(settings, service="s", instance_id="engine-0", environ={}) as telemetry:
            numbers = telemetry.registry.number
            for metric in (catalog.REQUESTS_RUNNING, catalog.REQUESTS_WAITING):
                numbers(metric).series("demo").set(0)
            utilization = numbers(catalog.KV_UTILIZATION).series("demo")
            utilization.set(0.1)
            await until(lambda: value() == 0.1, "the first export")
            network.strand()
            utilization.set(0.2)
            await until(lambda: value() == 0.2, "an export over another connection")


# -- The metrics path as a cluster has it: exporters, a real collector with the shipped configuration, two sinks


TTFT = "gen_ai.server.time_to_first_token"
PODS = [f"pod-{index}" for index in range(20)]
SHIPPED = Path(__file__).resolve().parents[2] / "deploy" / "otel" / "collector.yaml"


@contextmanager
def running_collector(folder: Path, sinks: Sequence[int], resource: dict[str, str] | None = None) -> Iterator[int]:
    """Run a collector that passes metrics on to the sinks at these ports of this machine; yield its own OTLP/gRPC port.

    `resource`: attributes that it adds to every resource, as a cluster's collector may.
    """
    port, health = free_port(), free_port()
    config = folder / "collector.yaml"
    config.write_text(yaml.safe_dump(_configuration(sinks, port, health, resource or {})))
    part = Part("collector", [collector_binary(), "--config", str(config)], folder / "collector.log")
    part.start()
    try:
        wait_until(lambda: _is_healthy(health), f"a collector that is healthy; see {part.log}")
        yield port
    finally:
        part.stop()


def _configuration(sinks: Sequence[int], port: int, health: int, resource: dict[str, str]) -> dict[str, Any]:
    """The chart's configuration with this machine's ports, the given sinks as replicas in plain text, and no
    Prometheus.
    """
    config: dict[str, Any] = yaml.safe_load(SHIPPED.read_text())
    config["receivers"]["otlp"]["protocols"] = {"grpc": {"endpoint": f"127.0.0.1:{port}"}}
    config["extensions"]["health_check"]["endpoint"] = f"127.0.0.1:{health}"
    shipped = next(each for name, each in config["exporters"].items() if name.startswith("otlp"))
    shipped = {name: value for name, value in shipped.items() if name != "headers"} | {"tls": {"insecure": True}}
    config["exporters"] = {
        f"otlp_grpc/operator-{index}": {**shipped, "endpoint": f"127.0.0.1:{sink}"} for index, sink in enumerate(sinks)
    }
    config["processors"]["resource"] = {
        "attributes": [
            {"key": key, "value": value, "action": "insert"} for key, value in {"added": "yes", **resource}.items()
        ]
    }
    pipeline = config["service"]["pipelines"]["metrics/operators"]
    processors = [name for name in pipeline["processors"] if name != "batch"]
    pipeline = {**pipeline, "processors": [*processors, "resource", "batch"], "exporters": [*config["exporters"]]}
    config["service"]["pipelines"] = {"metrics/operators": pipeline}
    return config


def _is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/", timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def observed(store: MetricsStore, now_s: float | None = None) -> PoolMetrics:
    return store.observe(namespace="ns", pool="demo", model="demo", pods=PODS, now_s=now_s)


@pytest.mark.kube
async def test_two_sinks_behind_one_collector_hold_the_same(tmp_path: Path) -> None:
    """Restarts, repeated and late exports included."""
    stores = [MetricsStore(), MetricsStore()]
    async with MetricsSink(stores[0], LOCAL) as first, MetricsSink(stores[1], LOCAL) as second:
        with running_collector(tmp_path, [first.port, second.port]) as port:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = MetricsServiceStub(channel)
                now = time.time() - 12
                for step in range(6):
                    time_s = now + 2 * step
                    began = now if step < 4 else now + 7  # all engines restart
                    done = 100 * step if step < 4 else 10 * step
                    prompt = total("pagestream.tokens.prompt", began, time_s, done)
                    latency = histogram(TTFT, now, time_s, (1.0, 2.0), (5 * step, step, 0))
                    engines = [engine(time_s, prompt, utilization=step / 10, pod=pod) for pod in PODS]
                    await stub.Export(export(*engines, gateway(time_s, latency, tokens=step)))
                    if step in (2, 4):
                        await stub.Export(export(engines[0]))  # again
                await stub.Export(export(engine(now + 1, utilization=0.99, pod=PODS[3])))  # late
                last = engine(
                    now + 11, gauge("pagestream.kv.utilization", now + 11, 0.5), utilization=0.77, pod=PODS[3]
                )
                await stub.Export(export(last))
                for store in stores:
                    await until(lambda store=store: _has_last(store), "the last export arrives")
        at = time.time()
        seen = [observed(store, at) for store in stores]
    assert seen[0] == seen[1]
    assert len(seen[0].samples) == len(PODS)
    assert {sample.kv_utilization for name, sample in seen[0].samples.items() if name != PODS[3]} == {0.5}
    assert {sample.prompt_tokens_per_s for sample in seen[0].samples.values()} == {(100 + 40 + 10) / 6}
    assert seen[0].queue is not None
    assert seen[0].queue.tokens == 5
    assert seen[0].ttft is not None
    assert seen[0].ttft.counts == (25, 5, 0)
    assert stores[0].outcomes == stores[1].outcomes


def _has_last(store: MetricsStore) -> bool:
    sample = observed(store).samples.get(PODS[3])
    return sample is not None and sample.kv_utilization == 0.77


@pytest.mark.kube
async def test_a_sink_that_comes_later_catches_up_within_one_export(tmp_path: Path) -> None:
    """And one that is away holds up neither the collector nor the other."""
    stores = [MetricsStore(), MetricsStore()]
    second = MetricsSink(stores[1], LOCAL)
    await second.start()
    port_of_second = second.port
    await second.stop()
    async with MetricsSink(stores[0], LOCAL) as first:
        with running_collector(tmp_path, [first.port, port_of_second], {"k8s.namespace.name": "ns"}) as port:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = MetricsServiceStub(channel)
                for step in range(3):
                    time_s = time.time()
                    await stub.Export(export(engine(time_s, utilization=step / 10), gateway(time_s, tokens=step)))
                    await until(lambda: _utilization(stores[0]) == step / 10, "the first sink has it")  # noqa: B023
                async with MetricsSink(stores[1], SinkSettings(host="127.0.0.1", port=port_of_second)):
                    exporting = asyncio.create_task(_export_until_heard(stub, stores[1]))
                    await until(exporting.done, "the second sink hears of it")
                    await exporting
    assert observed(stores[1]).samples.keys() == {"pod-0"}
    assert observed(stores[1]).queue is not None


async def _export_until_heard(stub: MetricsServiceStub, store: MetricsStore) -> None:
    while not observed(store).samples:
        time_s = time.time()
        await stub.Export(export(engine(time_s, utilization=0.9), gateway(time_s, tokens=9)))
        await asyncio.sleep(0.1)


def _utilization(store: MetricsStore) -> float:
    sample = observed(store).samples.get("pod-0")
    return -1.0 if sample is None else sample.kv_utilization
