import json
import logging
from collections.abc import Iterator

import pytest
from pagestream_gateway.logs import configure_logs


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back as it was."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:], logger.level = handlers, level


def test_a_record_is_one_line_with_its_extra_fields(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("INFO")
    root.getChild("a.b").info("said %s", "x\ny", extra={"request_id": "r"})
    [line] = capsys.readouterr().err.splitlines()
    body = json.loads(line)
    assert (body["message"], body["level"], body["logger"], body["request_id"]) == ("said x\ny", "INFO", "a.b", "r")
    assert body["time"]


def test_errors_have_their_trace(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logs("INFO")
    try:
        raise ValueError("why")
    except ValueError:
        root.exception("failed")
    assert "ValueError: why" in json.loads(capsys.readouterr().err)["exc_info"]
