"""The metrics path as a cluster has it: exporters, a real collector with the shipped configuration, two sinks."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc.aio
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from pagestream_operator.metrics import MetricsSink, MetricsStore, PoolMetrics, SinkSettings
from support.processes.waiting import until
from support.telemetry.metric_collectors import running_collector
from support.telemetry.otlp_messages import engine, export, gateway, gauge, histogram, total

LOCAL = SinkSettings(host="127.0.0.1", port=0)
TTFT = "gen_ai.server.time_to_first_token"
PODS = [f"pod-{index}" for index in range(20)]


def observed(store: MetricsStore, now_s: float | None = None) -> PoolMetrics:
    return store.observe(namespace="ns", pool="demo", model="demo", pods=PODS, now_s=now_s)


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
