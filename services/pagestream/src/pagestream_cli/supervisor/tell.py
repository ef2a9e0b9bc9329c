"""Telling a listener, whose failures are its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")

_log = logging.getLogger(__name__)


def tell(hear: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a listener. What it fails with is logged and ends nothing: parts do not die of who hears of them."""
    try:
        hear(*args, **kwargs)
    except Exception:  # noqa: BLE001 - it is the listener's defect, whatever it is
        _log.exception("a listener failed; the parts run on")
