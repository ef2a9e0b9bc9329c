"""The sink over real gRPC: exports by the OpenTelemetry SDK and by hand, whole and broken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable

import grpc
import grpc.aio
import pytest
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
from pagestream_operator.errors import SinkUnavailable
from pagestream_operator.metrics import MetricsSink, MetricsStore, SinkSettings
from support.telemetry.otlp_messages import engine, export, gateway, gauge, total

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


async def call(listening: MetricsSink, body: bytes, compression: grpc.Compression | None = None) -> bytes:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{listening.port}") as channel:
        answer: bytes = await channel.unary_unary(EXPORT)(body, compression=compression, timeout=20)
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
        await call(again, ExportMetricsServiceRequest().SerializeToString())


async def test_connections_outlive_a_sink_that_restarts(sink: tuple[MetricsSink, MetricsStore]) -> None:
    """An exporter keeps its channel; the next export after a restart arrives."""
    listening, store = sink
    async with grpc.aio.insecure_channel(f"127.0.0.1:{listening.port}") as channel:
        stub = MetricsServiceStub(channel)
        await stub.Export(export(engine(time.time())))
        await listening.stop()
        second = MetricsSink(store, SinkSettings(host="127.0.0.1", port=listening.port))
        async with second:
            await stub.Export(export(engine(time.time(), pod="pod-1")), wait_for_ready=True, timeout=20)
    assert "pod-1" in store.observe(namespace="ns", pool="demo", model="", pods=["pod-1"]).samples
