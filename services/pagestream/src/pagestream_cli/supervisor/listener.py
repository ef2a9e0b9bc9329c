"""Notification of changes of parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, Protocol

from pagestream_cli.supervisor.part import PartSpec, PartView
from pagestream_cli.supervisor.restart import Death

P = ParamSpec("P")

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Receives notifications, in the event loop, so it must not block. What it raises is logged and ignored."""

    def changed(self, views: Sequence[PartView]) -> None:
        """Called when a process was started, became ready, died or ended."""

    def died(self, view: PartView, death: Death, restart_delay_s: float) -> None:
        """Called when a part exited or was killed from outside; it is restarted after the delay."""

    def line(self, spec: PartSpec, text: str) -> None:
        """Called with each line that a part wrote."""


def notify(callback: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a listener. What it raises is logged and not passed on: a part must not end because of its listener."""
    try:
        callback(*args, **kwargs)
    except Exception:  # noqa: BLE001 - any defect of a listener
        _log.exception("a listener failed; the parts run on")
