"""Engines' processes that are forked from one that has imported what they need, in place of new interpreters.

A new interpreter imports torch and the engine for two seconds of processor time: more than most tests of a process.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
from collections.abc import Mapping
from multiprocessing.connection import wait
from threading import Lock

PROGRAM = "pagestream_worker.core_process"
_IMPORTED = ("torch", "pagestream_engine.engine", "pagestream_engine.runner", PROGRAM)

_taking = Lock()
"""Held while multiprocessing may read how a process has ended: whoever reads it second gets 255."""


class ForkedCore:
    """See `pagestream_worker.engine_core.Child`."""

    def __init__(self, connection: socket.socket) -> None:
        """Fork it, with the environment of this moment and one end of a connection."""
        multiprocessing.set_forkserver_preload(list(_IMPORTED))  # of no effect where the server runs
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_serve, args=(connection, dict(os.environ)))
        with _taking:
            self._process.start()
        self.pid = self._process.pid or 0

    def wait(self) -> int:
        """Wait for its end; return its exit code, or the negative number of the signal that ended it."""
        wait([self._process.sentinel])
        with _taking:
            self._process.join()
        return self._process.exitcode or 0

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self._process.kill()


def _serve(connection: socket.socket, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    importlib.import_module(PROGRAM).serve(connection, os.getppid())
