"""The worker's Prometheus endpoint, scraped and parsed by Prometheus' own library."""

from dataclasses import replace

from pagestream_engine import EngineStats
from pagestream_engine.worker.metrics import COUNTERS, GAUGES, EngineMetrics
from prometheus_client.parser import text_string_to_metric_families

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    num_blocks=100,
    num_free_blocks=75,
    kv_utilization=0.25,
    prefix_query_tokens=40,
    prefix_hit_tokens=16,
    num_preemptions=1,
    num_steps=7,
    num_prompt_tokens=50,
    num_generated_tokens=60,
    last_step_s=0.1,
    last_schedule_s=0.01,
    total_step_s=0.7,
    total_schedule_s=0.07,
)


def scrape(metrics: EngineMetrics) -> dict[str, float]:
    text = metrics.render().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_each_scrape_shows_the_engine_as_it_is_then() -> None:
    now = [STATS]
    metrics = EngineMetrics()
    assert scrape(metrics) == {}
    metrics.watch(lambda: now[0])
    first = scrape(metrics)
    now[0] = replace(STATS, num_running=4)
    second = scrape(metrics)
    assert len(first) == len(GAUGES) + len(COUNTERS)
    assert first["pagestream_kv_utilization_ratio"] == 0.25
    assert first["pagestream_generated_tokens_total"] == 60
    assert (first["pagestream_requests_running"], second["pagestream_requests_running"]) == (3, 4)
