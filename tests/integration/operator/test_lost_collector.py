"""A process whose collector vanishes without closing its connection."""

from pagestream_operator.metrics import MetricsSink, MetricsStore, SinkSettings
from pagestream_telemetry import catalog
from pagestream_telemetry.process import running_telemetry
from pagestream_telemetry.settings import TelemetrySettings
from support.network.flaky_network import FlakyNetwork
from support.processes.waiting import until

LOCAL = SinkSettings(host="127.0.0.1", port=0)


async def test_metrics_take_another_connection() -> None:
    """Which a Service leads to a collector that lives: nothing else tells the process that its own is gone."""
    store = MetricsStore()

    def value() -> float | None:
        sample = store.observe(namespace="", pool="", model="", pods=["engine-0"]).samples.get("engine-0")
        return None if sample is None else sample.kv_utilization

    async with MetricsSink(store, LOCAL) as sink, FlakyNetwork(sink.port) as network:
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
