"""Logs on stderr: JSON, one object a line, with the ids of request and trace. Prompts and keys are never logged."""

from __future__ import annotations

import logging

from pythonjsonlogger.json import JsonFormatter

from pagestream_telemetry.context import current_trace
from pagestream_telemetry.settings import TelemetrySettings

_JSON = "%(asctime)s %(levelname)s %(name)s %(message)s"
_NAMES = {"asctime": "time", "levelname": "level", "name": "logger"}
_TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Exports that fail are told once by whoever exports, not at each try.
_QUIET = {"uvicorn": logging.WARNING, "opentelemetry.exporter": logging.CRITICAL}
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure_logs(settings: TelemetrySettings) -> None:
    """Sends everything of the settings' level and above to stderr; what a record's `extra` holds becomes fields."""
    handler = logging.StreamHandler()
    formatter: logging.Formatter = JsonFormatter(_JSON, rename_fields=_NAMES)
    if settings.log_format == "text":
        formatter = TextFormatter(_TEXT)
    handler.setFormatter(formatter)
    handler.addFilter(add_trace)
    logging.basicConfig(level=settings.log_level, handlers=[handler], force=True)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)


def add_trace(record: logging.LogRecord) -> bool:
    """Gives a record the trace of the task that wrote it, unless it names one itself."""
    trace = current_trace()
    if trace and not hasattr(record, "trace_id"):
        record.trace_id, record.span_id = trace.trace_id, trace.span_id
    return True


class TextFormatter(logging.Formatter):
    """For people: the message, then the fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        fields = {name: value for name, value in record.__dict__.items() if name not in _STANDARD}
        told = " ".join(f"{name}={value}" for name, value in fields.items())
        first, newline, rest = super().format(record).partition("\n")
        return f"{first} [{told}]{newline}{rest}" if told else first + newline + rest
