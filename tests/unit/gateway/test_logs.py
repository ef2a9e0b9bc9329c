import json
import logging
import sys

from pagestream_gateway.logs import JsonFormatter


def test_a_record_is_one_line_with_its_extra_fields() -> None:
    record = logging.LogRecord("a.b", logging.INFO, "", 0, "said %s", ("x\ny",), None)
    record.request_id = "r"
    line = JsonFormatter().format(record)
    assert "\n" not in line
    body = json.loads(line)
    assert (body["message"], body["level"], body["logger"], body["request_id"]) == ("said x\ny", "INFO", "a.b", "r")


def test_errors_have_their_trace() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    assert "ValueError: why" in json.loads(JsonFormatter().format(record))["exception"]
