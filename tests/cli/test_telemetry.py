"""What a deployment exports to a real collector: metrics, one trace of a request whose engine was killed. And logs."""

import hashlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pagestream_telemetry import ENGINE_METRICS, GATEWAY_METRICS, Kind
from prometheus_client.parser import text_string_to_metric_families
from support.processes.stack import Stack, running_stack
from support.processes.waiting import LIMIT_S, wait_until
from support.telemetry.collector import Collector, Sample, Span, running_collector

pytestmark = pytest.mark.served

TESTS = Path(__file__).resolve().parents[1]
PACED = "support.engines.paced_worker"
TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER}-01"
NO_GPU = {"pagestream.gpu.utilization", "pagestream.gpu.memory.usage"}
NO_LIMIT_AND_NO_LONG_LOG = {
    "pagestream.redis.memory.limit",
    "pagestream.redis.log.entry_size",
    "pagestream.tenant.refusals",
}
NO_MODEL = {"pagestream.memory.usage"}
NOTHING_HAPPENED = {"pagestream.errors", "pagestream.degradation.transitions", "pagestream.speculation.accepted"}
"""What a paced engine has not."""


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Collector]:
    """The collector of all processes that are started after it; engines take 30 ms a step, without a model."""
    with running_collector(tmp_path_factory.mktemp("collector")) as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGESTREAM_TELEMETRY__OTLP_ENDPOINT", running.endpoint)
        patch.setenv("PAGESTREAM_TELEMETRY__EXPORT_INTERVAL_S", "0.5")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "pagestream.pool=pool-of-the-test")
        patch.setenv("PYTHONPATH", str(TESTS))
        patch.setenv("PACED_STEP_S", "0.03")
        yield running


@pytest.fixture(scope="module")
def stack(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One engine and two gateways. Other stacks export to the same collector under the same names, so samples are
    separated by time.
    """
    with running_stack(tmp_path_factory.mktemp("stack"), gateways=2, engine_module=PACED, is_forked=True) as running:
        yield running


def stream(stack: Stack, *, max_tokens: int, kill_after: int = 0, **more: object) -> list[str]:
    """Read a completion, and kill the engine that runs it after `kill_after` events. Returns the events."""
    body = {"model": "demo", "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True, **more}
    url, headers = f"{stack.gateways[0].url}/v1/completions", {"traceparent": TRACEPARENT}
    events = []
    with httpx.stream("POST", url, json=body, headers=headers, timeout=LIMIT_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if len(events) == kill_after:
                    stack.busiest_engine().kill()
    return events


def named(spans: list[Span], name: str, attempt: int = 0) -> list[Span]:
    return [span for span in spans if span.name == name and attempt in (0, span.attributes.get("pagestream.attempt"))]


def spans_of(collector: Collector, trace_id: str) -> list[Span]:
    return [span for span in collector.spans() if span.trace_id == trace_id]


def test_a_request_that_was_resumed_after_a_kill_is_one_trace(collector: Collector, tmp_path: Path) -> None:
    with running_stack(tmp_path, engines=2, engine_module=PACED, is_forked=True) as stack:
        # The spans of an engine leave it every half second: by then it has been in its decode for a while.
        events = stream(stack, max_tokens=100, kill_after=60)
        assert events[-1] == "[DONE]"

        def has_ended() -> bool:
            return {"decode", "completions"} <= {span.name for span in spans_of(collector, TRACE_ID)}

        wait_until(has_ended, what="the last spans")
        spans = spans_of(collector, TRACE_ID)
        drained = read_while_the_engine_drains(stack, collector)

    [server] = named(spans, "completions")
    assert (server.service, server.parent_id, server.kind, server.error) == ("pagestream-gateway", CALLER, 2, False)
    assert server.events == ("accepted", "first_token")
    assert server.attributes["gen_ai.usage.output_tokens"] == 100
    assert {span.parent_id for span in spans} == {CALLER, server.span_id}

    # Of the engine that was killed remains what had ended before: its wait and its prefill.
    first = [span for span in spans if span.attributes.get("pagestream.attempt") == 1]
    assert sorted(span.name for span in first) == ["prefill", "queue"]
    second = {span.name: span for span in spans if span.attributes.get("pagestream.attempt") == 2}
    assert sorted(second) == ["decode", "prefill", "queue"]
    [dead], [heir] = {span.instance for span in first}, {span.instance for span in second.values()}
    assert dead != heir
    for span in second.values():
        assert span.attributes["pagestream.epoch"] == 2
        assert span.attributes["pagestream.next_index"] >= 60
        assert span.attributes["pagestream.request.id"] == server.attributes["pagestream.request.id"]
    assert second["decode"].attributes["pagestream.outcome"] == "completed"

    # The phases follow each other, inside the server's span; clocks are one machine's.
    ended_first = max(span.end_s for span in first)
    assert server.start_s <= min(span.start_s for span in first) <= ended_first
    assert ended_first < second["queue"].start_s <= second["queue"].end_s
    assert second["queue"].end_s == pytest.approx(second["prefill"].start_s, abs=0.001)
    assert second["prefill"].end_s <= second["decode"].start_s <= second["decode"].end_s

    [decode], [server] = named(drained, "decode"), named(drained, "completions")
    assert decode.attributes["pagestream.outcome"] == "handed_back"
    assert (server.error, server.attributes["error.type"]) == (True, "disconnected")
    assert server.parent_id == "", "its caller named no trace"


def read_while_the_engine_drains(stack: Stack, collector: Collector) -> list[Span]:
    """Begins to read, has the last engine end in order, and leaves. Returns that trace."""
    body = {"model": "demo", "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{stack.gateways[0].url}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        lines = answer.iter_lines()
        while "data: " not in next(lines):
            pass
        [last] = [engine for engine in stack.engines if engine.is_alive()]
        last.signal(signal.SIGTERM)
        assert last.wait() == 0

    def traces() -> set[str]:
        return {span.trace_id for span in named(collector.spans(), "completions")} - {TRACE_ID}

    wait_until(lambda: bool(traces()), what="the server's span")
    [trace_id] = traces()
    return spans_of(collector, trace_id)


def test_every_metric_arrives_under_its_name(collector: Collector, stack: Stack) -> None:
    begin_ns = time.time_ns()  # earlier samples may be another stack's
    engines, gateways = "pagestream-engine", "pagestream-gateway"
    expected = {(engines, metric.name) for metric in ENGINE_METRICS if metric.name not in NO_GPU | NO_MODEL}
    expected |= {(gateways, metric.name) for metric in GATEWAY_METRICS if metric.name not in NO_LIMIT_AND_NO_LONG_LOG}
    expected -= {(engines, name) for name in NOTHING_HAPPENED}
    table = {metric.name: metric for metric in (*ENGINE_METRICS, *GATEWAY_METRICS)}
    stream(stack, max_tokens=20)
    refused = httpx.post(f"{stack.gateways[0].url}/v1/completions", json={"prompt": "x", "model": "none"})
    assert refused.status_code == 404
    assert cancel_one(stack)

    def fresh(name: str = "") -> list[Sample]:
        return [sample for sample in collector.samples(name) if sample.time_ns >= begin_ns]

    def missing() -> set[tuple[str, str]]:
        return expected - {(sample.service, sample.name) for sample in fresh()}

    def generated() -> float:
        return max((sample.value for sample in fresh("pagestream.tokens.generated")), default=0)

    def models(gateway: str) -> set[str]:
        """Return the models whose queue depth it exported; other classes exist only while requests wait."""
        depths = [sample for sample in fresh("pagestream.queue.depth") if sample.instance == gateway]
        return {
            sample.attributes["gen_ai.request.model"] for sample in depths if sample.attributes["class"] == "resume"
        }

    wait_until(lambda: not missing(), what="all metrics")
    wait_until(lambda: generated() >= 20, what="the tokens")
    # All gateways export the same values, for the same models; each reads them when its own second is over.
    wait_until(
        lambda: models("gateway-0") == models("gateway-1") != set(),
        limit_s=LIMIT_S,
        what="the same models from both gateways",
    )
    # What the collector calls a metric in Prometheus is what /metrics calls it.
    own = httpx.get(f"{stack.gateways[0].url}/metrics", timeout=LIMIT_S).text
    ours = {family.name for family in text_string_to_metric_families(own)}
    assert "gen_ai_server_time_to_first_token_seconds" in ours

    def unknown() -> set[str]:
        return ours - {family.name for family in text_string_to_metric_families(collector.exposition())}

    wait_until(lambda: not unknown(), what="the gateway's own names at the collector")
    samples = collector.samples()

    assert {sample.name for sample in samples} <= set(table)
    for sample in samples:
        metric = table[sample.name]
        assert (sample.unit, set(sample.attributes) <= set(metric.attributes)) == (metric.unit, True)
        assert sample.bounds == metric.bounds
        assert (sample.start_ns > 0) == (metric.kind is not Kind.GAUGE)
        assert sample.resource["pagestream.pool"] == "pool-of-the-test"
    assert {sample.instance for sample in fresh()} >= {"engine-0", "gateway-0", "gateway-1"}
    [whole] = {sample.value for sample in fresh("pagestream.engine.startup.duration")}
    parts = {sample.attributes["part"]: sample.value for sample in fresh("pagestream.engine.startup.part.duration")}
    assert set(parts) == {"process", "import", "weights", "cache", "warm_up", "join"}
    assert sum(parts.values()) == pytest.approx(whole)


def cancel_one(stack: Stack) -> bool:
    """Begins a long completion and cancels it by its id."""
    base = stack.gateways[0].url
    body = {"model": "demo", "prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=LIMIT_S) as answer:
        request_id = answer.headers["x-request-id"]
        for line in answer.iter_lines():
            if '"text"' in line:
                break
        state = httpx.delete(f"{base}/v1/requests/{request_id}", timeout=LIMIT_S).json()["finish_reason"]
    return bool(state == "cancelled")


def test_logs_name_request_and_trace_and_never_the_prompt_or_the_key(stack: Stack, tmp_path: Path) -> None:
    prompt, key = "a-secret-of-the-user", "sk-a-key-of-the-test"
    keys = tmp_path / "keys"
    keys.write_text(f"{hashlib.sha256(key.encode()).hexdigest()} tenant\n")
    gateway = stack.add_gateway("--api-keys", str(keys), "--log-level", "DEBUG")
    wait_until(gateway.is_ready, what=gateway.name)
    headers = {"Authorization": f"Bearer {key}", "traceparent": TRACEPARENT}
    body = {"model": "demo", "prompt": prompt, "max_tokens": 3}
    answer = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=LIMIT_S)
    request_id = answer.headers["x-request-id"]
    refused = httpx.post(f"{gateway.url}/v1/completions", json={**body, "max_tokens": -1}, headers=headers)
    assert refused.status_code == 400
    wait_until(lambda: '"answered"' in gateway.log.read_text(), what="the last record")
    logs = {part.name: part.log.read_text() for part in (gateway, stack.engines[0])}
    gateway.stop()
    everything = "".join(logs.values())
    assert prompt not in everything
    assert key not in everything
    for name, message in ((gateway.name, "accepted"), (gateway.name, "answered"), ("engine-0", "claimed")):
        records = [json.loads(line) for line in logs[name].splitlines()]
        [record] = [each for each in records if each["message"] == message and each.get("request_id") == request_id]
        assert record["trace_id"] == TRACE_ID
        assert record["span_id"] != CALLER


@pytest.mark.slow
def test_an_unreachable_collector_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGESTREAM_TELEMETRY__OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PAGESTREAM_TELEMETRY__EXPORT_INTERVAL_S", "0.2")
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PACED_STEP_S", "0.03")
    with running_stack(tmp_path, engine_module=PACED, is_forked=True) as stack:
        assert stream(stack, max_tokens=5)[-1] == "[DONE]"
        wait_until(
            lambda: all("can't be exported" in part.log_tail() for part in (*stack.engines, *stack.gateways)),
            limit_s=LIMIT_S,
            what="a word about it",
        )
        for part in (*stack.gateways, *stack.engines):
            part.signal(signal.SIGTERM)
        assert [part.wait() for part in (*stack.gateways, *stack.engines)] == [0, 0]
        for part in (*stack.gateways, *stack.engines):
            assert part.log.read_text().count("can't be exported") == 1, "once, not at each try"
