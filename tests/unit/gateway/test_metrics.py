from pagestream_gateway.metrics import Metrics
from pagestream_telemetry.exposition import render
from pagestream_telemetry.instruments import Registry
from prometheus_client.parser import text_string_to_metric_families


def test_exposition() -> None:
    registry = Registry()
    metrics = Metrics(registry)
    metrics.stream_opened()
    metrics.stream_opened()
    metrics.stream_closed()
    metrics.count_tokens(7)
    metrics.count_request("chat", "ok")
    metrics.count_request("chat", "ok")
    metrics.first_token("demo", "chat", 0.03)
    metrics.between_tokens("demo", 0.06)
    metrics.per_token("demo", "chat", 0.05)
    metrics.duration("demo", "chat", "", 1.5)
    metrics.duration("", "chat", "queue_full", 0.5)
    metrics.error("", "queue_full")
    metrics.cancelled("demo")
    families = {each.name: each for each in text_string_to_metric_families(render(registry, {}).decode())}
    samples = {
        (sample.name, *sorted(filter(None, sample.labels.values()))): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert metrics.streams_open == samples["pagestream_streams_open",] == 1
    assert samples["pagestream_gateway_tokens_total",] == 7
    assert samples["pagestream_gateway_requests_total", "chat", "ok"] == 2
    assert samples["pagestream_errors_total", "queue_full"] == samples["pagestream_cancellations_total", "demo"] == 1
    first = "gen_ai_server_time_to_first_token_seconds_bucket"
    assert (samples[first, "0.02", "chat", "demo"], samples[first, "0.04", "chat", "demo"]) == (0, 1)
    assert samples["gen_ai_server_request_duration_seconds_sum", "chat", "demo"] == 1.5
    assert samples["gen_ai_server_request_duration_seconds_count", "chat", "queue_full"] == 1
    assert samples["gen_ai_server_time_per_output_token_seconds_sum", "chat", "demo"] == 0.05
    assert samples["pagestream_inter_token_latency_seconds_sum", "demo"] == 0.06
