"""Logs on stderr: JSON, one object a line, with the ids of request and trace. Prompts and API keys are never logged."""

from __future__ import annotations

import logging

from pythonjsonlogger.json import JsonFormatter

from pagestream_telemetry.settings import TelemetrySettings
from pagestream_telemetry.tracing import add_trace

_JSON = "%(asctime)s %(levelname)s %(name)s %(message)s"
_NAMES = {"asctime": "time", "levelname": "level", "name": "logger"}
_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# `OtlpMetrics` logs a failing export once; the exporter itself would at each try.
_QUIET = {"uvicorn": logging.WARNING, "opentelemetry.exporter": logging.CRITICAL}
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure_logs(settings: TelemetrySettings, *, sets_traces: bool = False) -> None:
    """Log to stderr from the settings' level on; a record's `extra` becomes fields of its object.

    Args:
        sets_traces: whether tasks of this process set their traces, which their records then name.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter(_TEXT) if settings.log_format == "text" else json_formatter())
    if sets_traces:
        handler.addFilter(add_trace)
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)


def json_formatter() -> logging.Formatter:
    """Return what makes a record an object of JSON."""
    return JsonFormatter(_JSON, rename_fields=_NAMES)


class TextFormatter(logging.Formatter):
    """The text format: the message, then the fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; its traceback follows the fields."""
        fields = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        extra = " ".join(f"{name}={value}" for name, value in fields.items())
        first, newline, rest = super().format(record).partition("\n")
        return f"{first} [{extra}]{newline}{rest}" if extra else first + newline + rest
