"""What a process has of telemetry: spans and series without an exporter, an endpoint, logs, its callers' traces."""

import asyncio
import http.client
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
from pagestream_telemetry import (
    NO_TRACE,
    Endpoint,
    EndpointError,
    Probes,
    TelemetrySettings,
    TraceContext,
    caller_context,
    catalog,
    configure_logs,
    current_trace,
    resource_attributes,
    running_telemetry,
    set_trace,
    within_trace,
)
from support.processes.waiting import LIMIT_S


def test_without_an_endpoint_nothing_is_loaded_and_everything_is_counted() -> None:
    with running_telemetry(TelemetrySettings(), service="s", instance_id="i", environ={}) as telemetry:
        assert telemetry.tracer is None
        telemetry.registry.number(catalog.STREAMS_OPEN).series().set(2)
        text = telemetry.render().decode()
    assert "pagestream_streams_open 2.0" in text
    assert 'target_info{service_instance_id="i",service_name="s"' in text


def test_a_process_own_attributes_override_those_of_the_environment() -> None:
    environ = {
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=other,k8s.pod.name=demo-1, pagestream.pool = a%20b ,nonsense,=x",
    }
    attributes = resource_attributes("pagestream-engine", "engine-1", environ)
    assert attributes.pop("service.version")
    assert attributes == {
        "service.name": "pagestream-engine",
        "service.instance.id": "engine-1",
        "k8s.pod.name": "demo-1",
        "pagestream.pool": "a b",
    }


def test_the_export_of_metrics_outlives_a_bug(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither an exporter nor a connection that can't be opened anew ends the thread that exports."""
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import MetricExportResult

    exports, arrived = list[int](), threading.Event()

    def export(*_: object, **__: object) -> MetricExportResult:
        exports.append(len(exports))
        if len(exports) == 1:
            raise KeyError("a bug")
        arrived.set()
        return MetricExportResult.SUCCESS

    def shutdown(*_: object, **__: object) -> None:
        if not arrived.is_set():
            raise ValueError("another one")

    monkeypatch.setattr(OTLPMetricExporter, "export", export)
    monkeypatch.setattr(OTLPMetricExporter, "shutdown", shutdown)
    settings = TelemetrySettings(otlp_endpoint="http://127.0.0.1:9", export_interval_s=0.1, traces=False)
    with running_telemetry(settings, service="s", instance_id="i", environ={}):
        assert arrived.wait(LIMIT_S)
    assert "a bug" in caplog.text


def ask(endpoint: Endpoint, method: str, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=LIMIT_S)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def probes(problem: str = "", unready: str = "", profile: Callable[[int], str] | None = None) -> Probes:
    return Probes(lambda: problem, lambda: unready, lambda: b"metric 1\n", profile)


def test_probes_of_a_working_process_succeed() -> None:
    with Endpoint(probes(), "127.0.0.1", 0) as endpoint:
        assert ask(endpoint, "GET", "/healthz") == (200, "ok\n")
        assert ask(endpoint, "GET", "/readyz") == (200, "ready\n")
        assert ask(endpoint, "GET", "/metrics?x=1") == (200, "metric 1\n")
        assert ask(endpoint, "GET", "/else")[0] == 404


def test_failing_probes_give_the_reason() -> None:
    with Endpoint(probes("stuck", "loading"), "127.0.0.1", 0) as endpoint:
        assert ask(endpoint, "GET", "/healthz") == (503, "stuck\n")
        assert ask(endpoint, "GET", "/readyz") == (503, "loading\n")


def test_health_shows_a_report_where_there_is_one() -> None:
    found = Probes(lambda: "", lambda: "", lambda: b"", report=lambda: "one: seen\nother: not seen")
    with Endpoint(found, "127.0.0.1", 0) as endpoint:
        assert ask(endpoint, "GET", "/healthz") == (200, "ok\none: seen\nother: not seen\n")
        assert ask(endpoint, "GET", "/readyz") == (200, "ready\n")


def test_a_silent_client_blocks_no_other() -> None:
    with Endpoint(probes(), "127.0.0.1", 0) as endpoint, socket.create_connection(("127.0.0.1", endpoint.port)):
        assert ask(endpoint, "GET", "/healthz")[0] == 200


def test_a_profile_can_be_started_where_it_is_enabled() -> None:
    asked: list[int] = []

    def profile(steps: int) -> str:
        if asked:
            raise RuntimeError("one is under way")
        asked.append(steps)
        return "/there"

    with Endpoint(probes(profile=profile), "127.0.0.1", 0) as endpoint:
        assert ask(endpoint, "POST", "/debug/profile?steps=none")[0] == 400
        assert ask(endpoint, "POST", "/debug/profile?steps=0")[0] == 400
        assert ask(endpoint, "GET", "/debug/profile?steps=3")[0] == 404
        assert ask(endpoint, "POST", "/debug/profile?steps=3") == (202, "/there\n")
        assert ask(endpoint, "POST", "/debug/profile?steps=3") == (409, "one is under way\n")
    assert asked == [3]
    with Endpoint(probes(), "127.0.0.1", 0) as endpoint:
        assert ask(endpoint, "POST", "/debug/profile?steps=3")[0] == 404


def test_web_pages_reach_no_port_of_this_machine() -> None:
    """Neither by a name of their own that resolves to it, nor by a call that needs no answer."""
    started: list[int] = []

    def profile(steps: int) -> str:
        started.append(steps)
        return "/there"

    names = ("rebound.example", "rebound.example:80", "127.0.0.1.example", "[::1", "")
    for address, status in (("127.0.0.1", 403), ("0.0.0.0", 200)):  # noqa: S104 -- what pods bind
        with Endpoint(probes(profile=profile), address, 0) as endpoint:
            for name in names:
                assert ask(endpoint, "GET", "/metrics", {"Host": name})[0] == status, name
            for name in ("localhost", "LOCALHOST:9", "127.0.0.1:9400", "[::1]:9400"):
                assert ask(endpoint, "GET", "/metrics", {"Host": name})[0] == 200, name
            for origin in ("http://rebound.example", "null"):
                assert ask(endpoint, "POST", "/debug/profile?steps=3", {"Origin": origin})[0] == 403
    assert started == []


def test_a_taken_port_is_an_error_and_a_used_one_is_free_again() -> None:
    with Endpoint(probes(), "127.0.0.1", 0) as endpoint:
        with pytest.raises(EndpointError, match=f"127.0.0.1:{endpoint.port}"):
            Endpoint(probes(), "127.0.0.1", endpoint.port)
        port = endpoint.port
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics endpoint"]


TRACE = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    others = {name: logging.getLogger(name).level for name in ("uvicorn", "opentelemetry.exporter")}
    yield logger
    logger.handlers[:], logger.level = handlers, level
    for name, kept in others.items():
        logging.getLogger(name).setLevel(kept)


def test_a_record_is_one_line_with_its_extra_fields(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(TelemetrySettings())
    root.getChild("a.b").info("said %s", "x\ny", extra={"request_id": "r"})
    [line] = capsys.readouterr().err.splitlines()
    body = json.loads(line)
    assert (body["message"], body["level"], body["logger"], body["request_id"]) == ("said x\ny", "INFO", "a.b", "r")
    assert body["time"]
    assert "trace_id" not in body


def test_errors_have_their_trace(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(TelemetrySettings())
    try:
        raise ValueError("why")
    except ValueError:
        root.exception("failed")
    assert "ValueError: why" in json.loads(capsys.readouterr().err)["exc_info"]


def test_a_record_names_the_trace_of_its_task(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(TelemetrySettings(), sets_traces=True)
    with within_trace(TRACE):
        root.info("inside")
        root.info("of another", extra={"trace_id": "t", "span_id": "s"})
    root.info("outside")
    inside, other, outside = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (inside["trace_id"], inside["span_id"]) == ("a" * 32, "b" * 16)
    assert (other["trace_id"], other["span_id"]) == ("t", "s")
    assert "trace_id" not in outside


def test_the_text_format(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs(TelemetrySettings(log_format="text", log_level="WARNING"))
    root.info("below the level")
    root.warning("shown", extra={"request_id": "r", "n": 3})
    root.error("failed", exc_info=ValueError("why"))
    first, second, *_ = lines = capsys.readouterr().err.splitlines()
    assert first.endswith("WARNING root: shown [request_id=r n=3]")
    assert second.endswith("ERROR   root: failed")
    assert lines[-1] == "ValueError: why"


PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def test_a_callers_trace_is_parsed() -> None:
    context = caller_context(PARENT, "vendor=1")
    assert (context.trace_id, context.span_id, context.tracestate) == ("a" * 32, "b" * 16, "vendor=1")
    assert context


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        f"00-{'A' * 32}-{'b' * 16}-01",
        f"{PARENT}-more",
        f"{PARENT}\n",
    ],
)
def test_a_malformed_trace_is_no_trace(traceparent: str) -> None:
    assert caller_context(traceparent, "vendor=1") == NO_TRACE
    assert not NO_TRACE
    assert (NO_TRACE.trace_id, NO_TRACE.span_id) == ("", "")


def test_a_long_state_is_cut() -> None:
    assert len(caller_context(PARENT, "x" * 5000).tracestate) == 512


async def test_each_task_has_its_own_trace() -> None:
    async def other() -> TraceContext:
        set_trace(TraceContext(PARENT))
        return current_trace()

    assert (await asyncio.create_task(other())).trace_id == "a" * 32
    assert current_trace() == NO_TRACE
    with within_trace(TraceContext(PARENT)):
        assert current_trace().trace_id == "a" * 32
    assert current_trace() == NO_TRACE
