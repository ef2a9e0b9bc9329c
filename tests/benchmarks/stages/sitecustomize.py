"""Watch the stages of a token's path in a Python process that `path_cost.py` has started, and in its children.

Python imports this module at its start, as `PYTHONPATH` names its folder. The folder in `PAGESTREAM_STAGES` is what the
two exchange: `stamp` or `sample`, written by the benchmark, begins, `off` ends, and the process writes `<pid>.json`.

- **stamp** wraps the functions of HOPS and keeps the times at which they begin and end.
- **sample** has the kernel interrupt the process after each millisecond of processor time, and adds it to the function
  that runs in the thread which has used most since the last time.

Nothing is wrapped, and no timer runs, before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

POLL_S = 0.05
SAMPLE_S = 0.001
SWITCH_S = 0.0002
"""How long a thread may keep the interpreter from the one that takes samples."""
HOPS = (
    ("pagestream_engine", "Engine.step", "step"),
    ("pagestream_streams.connection.connection", "Connection.run_each_acknowledged", "append"),
    ("pagestream_streams.gateway.readers", "LogRead.offer", "wake"),
)
"""Where a token's stages end: module, function, name of its times. Each is looked up in its class when it is called."""


class Watch:
    """What this process has seen."""

    def __init__(self) -> None:
        self.stamps: dict[str, list[tuple[int, int]]] = {}
        self.samples: Counter[str] = Counter()
        self._spent: dict[int, int] = {}

    def stamp(self) -> None:
        """Wrap the functions whose modules this process has."""
        for module, path, name in HOPS:
            if module not in sys.modules:
                continue
            owner_name, _, attribute = path.rpartition(".")
            owner = getattr(importlib.import_module(module), owner_name)
            setattr(owner, attribute, self._timed(getattr(owner, attribute), self.stamps.setdefault(name, [])))

    def _timed(self, function: Callable[..., Any], times: list[tuple[int, int]]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **named: Any) -> Any:
                began = time.monotonic_ns()
                result = await function(*args, **named)
                times.append((began, time.monotonic_ns()))
                return result

            return awaited

        @functools.wraps(function)
        def called(*args: Any, **named: Any) -> Any:
            began = time.monotonic_ns()
            result = function(*args, **named)
            times.append((began, time.monotonic_ns()))
            return result

        return called

    def sample(self) -> None:
        """Begin to take samples. The handler is there since the process began: only a main thread can set one."""
        sys.setswitchinterval(SWITCH_S)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)

    def take(self, signum: int, frame: FrameType | None) -> None:
        """Add one sample to the function of the thread that has used most since the last one."""
        used: dict[int, int] = {}
        frames = sys._current_frames()
        if frame is not None:
            frames[threading.get_ident()] = frame
        for thread in frames:
            try:
                spent = time.clock_gettime_ns(time.pthread_getcpuclockid(thread))
            except OSError:  # it has ended
                continue
            used[thread] = spent - self._spent.get(thread, 0)
            self._spent[thread] = spent
        if used:
            at = frames[max(used, key=lambda thread: used[thread])]
            self.samples[f"{at.f_code.co_filename}:{at.f_code.co_qualname}"] += 1


def watch(folder: Path) -> None:
    """Wait for the benchmark's word in a thread, watch, and write what was seen."""
    watch = Watch()
    signal.signal(signal.SIGPROF, watch.take)
    # a system call that a sample interrupts goes on by itself, in libraries, too
    signal.siginterrupt(signal.SIGPROF, False)

    def run() -> None:
        while not (kinds := [kind for kind in ("stamp", "sample") if (folder / kind).exists()]):
            time.sleep(POLL_S)
        getattr(watch, kinds[0])()
        while not (folder / "off").exists():
            time.sleep(POLL_S)
        signal.setitimer(signal.ITIMER_PROF, 0)
        seen = {"stamps": watch.stamps, "samples": watch.samples}
        part = folder / f"{os.getpid()}.part"
        part.write_text(json.dumps(seen))
        part.rename(folder / f"{os.getpid()}.json")

    threading.Thread(target=run, name="stages", daemon=True).start()


if folder := os.environ.get("PAGESTREAM_STAGES"):
    watch(Path(folder))
