from pagestream_operator import metrics


def test_exported_names() -> None:
    assert metrics.__all__ == [
        "MetricsSink",
        "MetricsStore",
        "PodRef",
        "PoolMetrics",
        "PrometheusSettings",
        "PrometheusSource",
        "SinkAccess",
        "SinkAccessSettings",
        "SinkSettings",
        "StoreSettings",
    ]
    assert all(hasattr(metrics, name) for name in metrics.__all__)
