"""The cost of many pods' metrics in an operator.

Exports of engines with all their metrics, batched as a collector batches them, against decoding the messages alone.

    python tests/benchmarks/metrics_sink.py [--pods 1000] [--interval 2] [--rounds 10] [--batch 100] [--short]
"""

import argparse
import asyncio
import resource as system
import statistics
import subprocess
import sys
import time

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from pagestream_operator.metrics import MetricsSink, MetricsStore, SinkSettings
from pagestream_telemetry.catalog import ENGINE_METRICS, Kind, Metric


def text(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))


def metric_of(entry: Metric, began_ns: int, now_ns: int, step: int) -> metrics_pb2.Metric:
    labels = [text(name, "demo") for name in entry.attributes]
    times = {"attributes": labels, "start_time_unix_nano": began_ns, "time_unix_nano": now_ns}
    made = metrics_pb2.Metric(name=entry.name, unit=entry.unit, description=entry.text)
    if entry.kind is Kind.HISTOGRAM:
        counts = [step] * (len(entry.bounds) + 1)
        made.histogram.aggregation_temporality = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE
        made.histogram.data_points.add(**times, explicit_bounds=entry.bounds, bucket_counts=counts, count=sum(counts))
    elif entry.kind is Kind.COUNTER:
        made.sum.aggregation_temporality, made.sum.is_monotonic = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE, True
        made.sum.data_points.add(**times, as_int=1000 * step)
    else:
        made.gauge.data_points.add(**times, as_double=0.5)
    return made


def export_of(pod: int, began_ns: int, now_ns: int, step: int) -> metrics_pb2.ResourceMetrics:
    name = f"demo-engine-5d8f9c7b6-{pod:05d}"
    names = {
        "service.name": "pagestream-engine",
        "service.instance.id": name,
        "k8s.namespace.name": "default",
        "k8s.pod.name": name,
        "k8s.pod.uid": f"7f1b7c1e-0000-4000-8000-{pod:012d}",
        "pagestream.pool": f"pool-{pod // 20}",
        "pagestream.model": "demo",
    }
    made = metrics_pb2.ResourceMetrics(resource=Resource(attributes=[text(*entry) for entry in names.items()]))
    made.scope_metrics.add(metrics=[metric_of(entry, began_ns, now_ns, step) for entry in ENGINE_METRICS])
    return made


def requests_of(pods: int, batch: int, began_ns: int, now_ns: int, step: int) -> list[ExportMetricsServiceRequest]:
    exports = [export_of(pod, began_ns, now_ns, step) for pod in range(pods)]
    return [
        ExportMetricsServiceRequest(resource_metrics=exports[start : start + batch]) for start in range(0, pods, batch)
    ]


def cpu_s() -> float:
    used = system.getrusage(system.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def serve(pods: int) -> None:
    """Run the sink's process: for each line of input it prints the resources used since the last one."""
    store = MetricsStore()
    async with MetricsSink(store, SinkSettings(host="127.0.0.1", port=0)) as sink:
        print(sink.port, flush=True)
        last = cpu_s()
        while await asyncio.to_thread(sys.stdin.readline):
            names = [f"demo-engine-5d8f9c7b6-{pod:05d}" for pod in range(pods)]
            held = sum(
                len(
                    store.observe(
                        namespace="default", pool=f"pool-{each}", model="demo", pods=names[20 * each :][:20]
                    ).samples
                )
                for each in range((pods + 19) // 20)
            )
            now = cpu_s()
            memory = system.getrusage(system.RUSAGE_SELF).ru_maxrss
            print(now - last, held, memory, flush=True)
            last = now


def measure(options: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "--serve", "--pods", str(options.pods)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the sink's process has no pipes")
        port = int(process.stdout.readline())
        began_ns = time.time_ns()
        used: list[float] = []
        decoding: list[float] = []
        size = held = memory = 0
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = MetricsServiceStub(channel)
            for step in range(options.rounds + 1):
                requests = requests_of(options.pods, options.batch, began_ns, time.time_ns(), step)
                for request in requests:
                    stub.Export(request)
                process.stdin.write("\n")
                process.stdin.flush()
                cost, held_text, memory_text = process.stdout.readline().split()
                held, memory = int(held_text), int(memory_text)
                bodies = [request.SerializeToString() for request in requests]
                size = sum(map(len, bodies))
                start = cpu_s()
                for body in bodies:
                    ExportMetricsServiceRequest.FromString(body)
                if step:  # warm-up
                    used.append(float(cost))
                    decoding.append(cpu_s() - start)
        process.stdin.close()
    if held != options.pods:
        raise RuntimeError(f"the store holds {held} of {options.pods} pods")
    each, alone = statistics.median(used), statistics.median(decoding)
    interval = f"{size / 1e6:.2f} MB an interval, {options.batch} pods a message"
    print(f"{options.pods} pods, {len(ENGINE_METRICS)} metrics each: {interval}")
    per_pod = f"{1e6 * each / options.pods:.0f} us a pod, {each / alone:.1f}x decoding alone"
    print(f"sink: {1e3 * each:.0f} ms of CPU an interval, {per_pod}")
    share = 100 * each / options.interval
    print(f"{share:.1f} % of a core at one export every {options.interval:g} s; peak {memory / 1024:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--interval", type=float, default=2.0, help="seconds between two exports of a pod")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=100, help="pods in one message")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.short:
        options.rounds = 3
    if options.serve:
        asyncio.run(serve(options.pods))
    else:
        measure(options)


if __name__ == "__main__":
    main()
