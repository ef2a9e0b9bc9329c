"""Reads adapters' matrices on a thread beside the steps, one after the other."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import torch

from pagestream_engine.adapters.files import ModuleWeights, read_adapter
from pagestream_engine.adapters.modules import ModuleSlice
from pagestream_engine.errors import AdapterError
from pagestream_engine.request import Adapter

Weights = Mapping[str, ModuleWeights]
Done = Callable[[Weights | None, str | None], None]
"""Gets the matrices, or why there are none."""

_log = logging.getLogger(__name__)
_CLOSE_LIMIT_S = 5.0


Wanted = queue.SimpleQueue[tuple[Adapter, Done] | None]


class AdapterLoader:
    """A thread that begins with the first adapter. Who wants adapters bounds their number (`AdapterResidency`).

    A disk that does not answer delays the adapters that are wanted after it, and no step. `close` ends the thread, and
    so does the end of the loader itself.
    """

    def __init__(self, modules: Mapping[str, ModuleSlice], dtype: torch.dtype, max_rank: int) -> None:
        """`modules`, `dtype` and `max_rank` as for `read_adapter`."""
        self._read = partial(read_adapter, modules=modules, dtype=dtype, max_rank=max_rank)
        self._wanted: Wanted = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def load(self, adapter: Adapter, done: Done) -> None:
        """Begin to read an adapter's matrices into the CPU's memory; `done` is called on the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._wanted, self._read), name="adapters", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._wanted.put, None)
        self._wanted.put((adapter, done))

    def close(self) -> None:
        """End the thread after the adapters that are wanted; one that hangs is left behind after 5 s."""
        if self._thread is not None:
            self._wanted.put(None)
            self._thread.join(_CLOSE_LIMIT_S)
            self._thread = None


def _run(wanted: Wanted, read: Callable[[Adapter], Weights]) -> None:
    while _serve(wanted.get(), read):  # keeps no reference to what was read, nor to who wanted it
        pass


def _serve(wanted: tuple[Adapter, Done] | None, read: Callable[[Adapter], Weights]) -> bool:
    """Read an adapter; return whether there may be others."""
    if wanted is None:
        return False
    adapter, done = wanted
    try:
        weights = read(adapter)
    except AdapterError as error:
        done(None, str(error))
    except BaseException as error:  # noqa: BLE001 - a file of an unforeseen form ends its requests alone
        _log.exception("adapter %s could not be read", adapter.name)
        done(None, f"{adapter.folder}: malformed: {type(error).__name__}: {error}")
    else:
        done(weights, None)
    return True
