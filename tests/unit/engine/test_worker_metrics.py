"""The worker's Prometheus endpoint, scraped and parsed by Prometheus' own library."""

import socket
from dataclasses import replace
from urllib.request import urlopen

import pytest
from pagestream_engine import EngineStats
from pagestream_engine.worker.metrics import COUNTERS, GAUGES, metrics_endpoint
from prometheus_client.parser import text_string_to_metric_families
from stack import free_port

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


def scrape(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        text = response.read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def test_each_scrape_shows_the_engine_as_it_is_then() -> None:
    now = [STATS]
    port = free_port()
    with metrics_endpoint(lambda: now[0], port):
        first = scrape(port)
        now[0] = replace(STATS, num_running=4)
        second = scrape(port)
    assert len(first) == len(GAUGES) + len(COUNTERS)
    assert first["pagestream_kv_utilization_ratio"] == 0.25
    assert first["pagestream_generated_tokens_total"] == 60
    assert (first["pagestream_requests_running"], second["pagestream_requests_running"]) == (3, 4)


def test_the_port_is_free_again_afterwards() -> None:
    port = free_port()
    with metrics_endpoint(lambda: STATS, port):
        pass
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_a_taken_port_is_an_error() -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken, pytest.raises(OSError, match="in use"):  # noqa: S104
        with metrics_endpoint(lambda: STATS, taken.getsockname()[1]):
            pass
