"""Metrics of engines and gateways: an OTLP/gRPC sink, a Prometheus client, and the store that both fill."""

from pagestream_operator.metrics.prometheus import PrometheusSettings, PrometheusSource
from pagestream_operator.metrics.queues import share_of_all, total_latencies, total_queue
from pagestream_operator.metrics.sink import Intake, MetricsSink, SinkAccess, SinkAccessSettings, SinkSettings
from pagestream_operator.metrics.store import MetricsStore, PodRef, PoolMetrics, SteadyClock, StoreSettings

__all__ = [
    "Intake",
    "MetricsSink",
    "MetricsStore",
    "PodRef",
    "PoolMetrics",
    "PrometheusSettings",
    "PrometheusSource",
    "SinkAccess",
    "SinkAccessSettings",
    "SinkSettings",
    "SteadyClock",
    "StoreSettings",
    "share_of_all",
    "total_latencies",
    "total_queue",
]
