"""Record the calls of product functions in a Python process that `tools/paths.py` has started, and in its children.

Python imports this module at its start, as `PYTHONPATH` names its folder. The folder in `PAGESTREAM_TRACE` is what the
two exchange:

- `<pid>.started`: this process can record;
- `on`, written by the tool: record from now on, which `<pid>.recording` confirms;
- `off`, written by the tool: stop, and write the records to `<pid>.json`.

`sys.settrace` gives calls, executed lines and returns; `sys.setprofile`, used while recording alone, gives calls of C
functions. The process runs without either having an effect but for its speed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

POLL_S = 0.02
PURE = frozenset(
    (
        "len",
        "isinstance",
        "issubclass",
        "any",
        "all",
        "min",
        "max",
        "sum",
        "getattr",
        "hasattr",
        "callable",
        "id",
        "iter",
        "next",
        "get",
        "keys",
        "values",
        "items",
        "isdisjoint",
        "issubset",
        "issuperset",
        "startswith",
        "endswith",
        "monotonic",
        "monotonic_ns",
        "perf_counter",
        "perf_counter_ns",
        "time",
    )
)
"""Names of C functions that change nothing, or an iterator that their caller has made."""
SENDING = frozenset(("send", "sendall", "sendmsg"))
EMPTY = (bool, int, float, str, bytes, list, tuple, dict, set, frozenset)


class Call:
    """A call of a product function that has not returned."""

    __slots__ = ("acts", "frame", "lines", "place")

    def __init__(self, frame: FrameType, place: int) -> None:
        self.frame = frame
        self.place = place
        """Of its record."""
        self.lines: set[int] = set()
        self.acts = False
        """Whether it has called what may change something: another library's function, or a C function beyond PURE."""


class ThreadCalls(threading.local):
    """Calls of one thread: the ones that run, and a record for each.

    A record is `[start, end, depth, outcome]`: nanoseconds of the monotonic clock, calls around it, place in
    `Recorder.outcomes`. One of bytes that the thread has sent has the outcome -1.
    """

    def __init__(self, register: Callable[[list[list[int]]], None]) -> None:
        self.stack: list[Call] = []
        self.records: list[list[int]] = []
        self.is_profiled = False
        register(self.records)


class Recorder:
    """Records the calls of all threads of this process while it is on."""

    def __init__(self, sources: str) -> None:
        self._sources = sources
        self.is_on = False
        self.threads: list[list[list[int]]] = []
        self.outcomes: dict[tuple[CodeType, bool, bool, tuple[int, ...]], int] = {}
        """How calls went: function, whether it acted, whether it returned nothing, lines that ran."""
        self._calls = ThreadCalls(self.threads.append)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """Handle the call of any function; for one of the product return what handles its lines and its return."""
        if not self.is_on or event != "call":
            return None
        calls = self._calls
        if not calls.is_profiled:
            calls.is_profiled = True
            sys.setprofile(self._profile)
        stack = calls.stack
        while stack and not _is_running(stack[-1].frame, frame):
            stack.pop()  # ended while its thread was not traced
        if not self._is_product(frame.f_code):
            if stack and frame.f_back is stack[-1].frame:
                stack[-1].acts = True
            return None
        calls.records.append([time.monotonic_ns(), 0, len(stack), -2])
        stack.append(Call(frame, len(calls.records) - 1))
        return self._trace_product

    def _is_product(self, code: CodeType) -> bool:
        name = code.co_filename
        return name.startswith(self._sources) and "/src/" in name and "_pb2" not in name

    def _trace_product(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        calls = self._calls
        if not calls.stack or calls.stack[-1].frame is not frame:
            return None
        call = calls.stack[-1]
        if event == "line":
            call.lines.add(frame.f_lineno)
        elif event == "exception":
            call.acts = True
        elif event == "return":
            calls.stack.pop()
            is_empty = argument is None or (type(argument) in EMPTY and not argument)
            key = (frame.f_code, call.acts, is_empty, tuple(sorted(call.lines)))
            record = calls.records[call.place]
            record[1] = time.monotonic_ns()
            record[3] = self.outcomes.setdefault(key, len(self.outcomes))
        return self._trace_product

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        calls = self._calls
        if not self.is_on:
            sys.setprofile(None)
            return
        if event == "c_call":
            if calls.stack and calls.stack[-1].frame is frame and argument.__name__ not in PURE:
                calls.stack[-1].acts = True
        elif event == "c_return" and (argument.__name__ in SENDING or argument is os.write):
            now = time.monotonic_ns()
            calls.records.append([now, now, len(calls.stack), -1])

    def dump(self) -> dict[str, Any]:
        """Return the records as plain values."""
        outcomes = [
            (code.co_filename, code.co_qualname, code.co_firstlineno, acts, is_empty, lines)
            for code, acts, is_empty, lines in list(self.outcomes)
        ]
        return {"title": _title(), "parent": os.getppid(), "outcomes": outcomes, "threads": self.threads}


def _is_running(caller: FrameType, frame: FrameType) -> bool:
    """Whether a call is among those around a frame."""
    around = frame.f_back
    while around is not None:
        if around is caller:
            return True
        around = around.f_back
    return False


def _title() -> str:
    """Return the first word of the process's title."""
    try:
        return Path("/proc/self/cmdline").read_bytes().split(b"\0")[0].decode().split(" ")[0]
    except OSError:
        return " ".join(sys.orig_argv)


def _write(path: Path, text: str) -> None:
    """Write a file that nobody sees half of."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _follow(folder: Path, recorder: Recorder) -> None:
    """Do as the tool's files say."""

    def wait_for(name: str) -> None:
        while not (folder / name).exists():
            if not folder.exists():
                return  # the tool has ended
            time.sleep(POLL_S)

    own = folder / str(os.getpid())
    wait_for("on")
    recorder.is_on = True
    _write(own.with_suffix(".recording"), "")
    wait_for("off")
    recorder.is_on = False
    if folder.exists():
        _write(own.with_suffix(".json"), json.dumps(recorder.dump()))


def start() -> None:
    """Trace this process from its start."""
    folder = Path(os.environ["PAGESTREAM_TRACE"])
    recorder = Recorder(os.environ["PAGESTREAM_SOURCES"])
    watcher = threading.Thread(target=_follow, args=(folder, recorder), name="trace", daemon=True)
    watcher.start()
    threading.settrace(recorder.trace)
    sys.settrace(recorder.trace)
    _write(folder / f"{os.getpid()}.started", "")


if "PAGESTREAM_TRACE" in os.environ and "serve" not in sys.orig_argv:
    start()
