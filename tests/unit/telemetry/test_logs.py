import json
import logging
from collections.abc import Iterator

import pytest
from pagestream_telemetry.context import TraceContext, within_trace
from pagestream_telemetry.logs import configure_logs
from pagestream_telemetry.settings import TelemetrySettings

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
    configure_logs(TelemetrySettings())
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
