"""How metrics reach the operator: an OTLP/gRPC sink, and the store that the scaling law is fed from."""

from pagestream_operator.metrics.errors import MetricsError, SinkUnavailable, SourceUnavailable
from pagestream_operator.metrics.prometheus import PrometheusSettings, PrometheusSource
from pagestream_operator.metrics.settings import SinkSettings, StoreSettings
from pagestream_operator.metrics.sink import MetricsSink
from pagestream_operator.metrics.store import MetricsStore, PodRef, PoolMetrics

__all__ = [
    "MetricsError",
    "MetricsSink",
    "MetricsStore",
    "PodRef",
    "PoolMetrics",
    "PrometheusSettings",
    "PrometheusSource",
    "SinkSettings",
    "SinkUnavailable",
    "SourceUnavailable",
    "StoreSettings",
]
