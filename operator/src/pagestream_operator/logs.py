"""Logs of the libraries, made to fit into ours."""

import logging

_QUIET = {"httpx2": logging.WARNING, "kopf": logging.WARNING, "kopf._core.reactor.running": logging.ERROR}
"""A line for each call and each watch says nothing that the metrics don't; kopf's signals are left to us on purpose."""
_NOT_TEXT = ("settings", "k8s_skip", "k8s_ref")
"""What kopf hangs on its records for its own use."""


def fit_libraries() -> None:
    """Call it after logs were configured."""
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_strip)


def _strip(record: logging.LogRecord) -> bool:
    for name in _NOT_TEXT:
        record.__dict__.pop(name, None)
    return True
