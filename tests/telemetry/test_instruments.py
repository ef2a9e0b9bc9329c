import logging

import pytest
from pagestream_telemetry import Family, Registry, TelemetryError, catalog


def families(registry: Registry) -> dict[str, Family]:
    return {family.metric.name: family for family in registry.collect()}


def test_a_gauge_that_was_not_set_is_not_exported() -> None:
    registry = Registry()
    series = registry.number(catalog.KV_UTILIZATION).series("demo")
    assert families(registry) == {}
    series.set(0.5)
    [point] = families(registry)["pagestream.kv.utilization"].points
    assert (point.value, point.attributes) == (0.5, {"gen_ai.request.model": "demo"})
    series.set(None)
    assert families(registry) == {}


def test_a_counter_is_exported_from_zero_on() -> None:
    registry = Registry()
    series = registry.number(catalog.ERRORS).series("", "queue_full")
    [point] = families(registry)["pagestream.errors"].points
    assert (point.value, point.attributes) == (0, {"error.type": "queue_full"})
    series.add()
    series.add(2)
    assert registry.number(catalog.ERRORS).series("", "queue_full") is series
    assert families(registry)["pagestream.errors"].points[0].value == 3


def test_a_bucket_holds_what_is_at_most_its_bound() -> None:
    registry = Registry()
    series = registry.distribution(catalog.BATCH_SIZE).series("demo")
    for size in (1, 2, 3, 1024, 5000):
        series.record(size)
    series.record(2, count=10)
    [point] = families(registry)["pagestream.batch.size"].points
    assert (point.counts[:3], point.counts[-2:]) == ((1, 11, 1), (1, 1))
    assert (sum(point.counts), point.total) == (15, 6050)


def test_other_series_can_be_removed() -> None:
    registry = Registry()
    depth = registry.number(catalog.QUEUE_DEPTH)
    for queue in ("0", "1"):
        depth.series("demo", queue).set(1)
    depth.forget_others({("demo", "1")})
    assert [point.attributes["class"] for point in families(registry)["pagestream.queue.depth"].points] == ["1"]


def test_attributes_are_those_of_the_catalog() -> None:
    with pytest.raises(TelemetryError, match=r"pagestream\.errors"):
        Registry().number(catalog.ERRORS).series("demo")


def test_other_values_are_collected_where_a_source_fails(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    gauge = registry.number(catalog.STREAMS_OPEN).series()

    def fails() -> None:
        raise ValueError("why")

    registry.on_collect(fails)
    registry.on_collect(lambda: gauge.set(3))
    with caplog.at_level(logging.ERROR):
        assert families(registry)["pagestream.streams.open"].points[0].value == 3
    assert "a source of metrics failed" in caplog.text
