"""JSON logs on stderr: one object a line. Prompts and keys are never logged."""

import logging

from pythonjsonlogger.json import JsonFormatter

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
NAMES = {"asctime": "time", "levelname": "level", "name": "logger"}


def configure_logs(level: str) -> None:
    """Sends everything of `level` and above to stderr as JSON; what a record's `extra` holds becomes fields."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter(FORMAT, rename_fields=NAMES))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
