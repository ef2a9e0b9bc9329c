"""Trace what one decode step and one streamed chat request cross, and write the figures to docs/architecture.md.

It starts `pagestream serve` with the demo model, sends the same chat a few times until everything is warm, then a few
times while `tools/tracing/sitecustomize.py` records the calls of each process of gateway and engine.

- **A decode step** begins with `Engine.step` and ends when the thread that runs it has sent the step's report. It
  counts that thread, and all threads of processes that the engine has started for its executor.
- **A streamed chat** begins before the client sends its first byte and ends after its last one has come. It counts all
  threads of gateway, worker and engine, but for what the event loop calls as often while there is no chat.

A function counts where more than half of the traced steps, or chats, have entered it: a heartbeat that falls into one
of them doesn't, nor what a first or last step does beside. Generated files, lambdas, comprehensions and module bodies
don't count.

A function is **entered for nothing** where each of its calls has found nothing to do:

- it returned None, False, 0, or something empty, and
- the statements that ran hold nothing but tests, assignments to local names and a return, with at least one test, or
  its body is empty; emptying an attribute while its value is read counts as a test
  (`taken, self._new = self._new, []`),
- and it called nothing but functions of the same kind and C functions that change nothing.

A file is entered for nothing where each of its functions is. No check fails by these figures.
"""

from __future__ import annotations

import argparse
import ast
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- written by make paths -->", "<!-- end of make paths -->"
STEP = "Engine.step"
BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Tell me a story about the lighthouse."}],
    "max_tokens": 8,
    "temperature": 0.7,
    "seed": 1,
    "stream": True,
}
WARM_UPS = 8
CHATS = 25
LIMIT_S = 240.0
"""Longest wait for a condition, on a machine that does much else."""


class Function(NamedTuple):
    """A function of the product, by the file below the checkout that defines it."""

    file: str
    name: str
    line: int


class Call(NamedTuple):
    """One call, as recorded."""

    start: int
    end: int
    depth: int
    """Calls of the product around it."""
    function: Function
    is_for_nothing: bool


class Process(NamedTuple):
    """What one process has recorded."""

    pid: int
    title: str
    parent: int
    calls: list[list[Call]]
    """By thread."""
    sends: list[list[int]]
    """Times at which each thread has sent bytes."""


@dataclass(frozen=True)
class Crossing:
    """The functions of one path, and those of them that were entered for nothing."""

    functions: frozenset[Function]
    for_nothing: frozenset[Function]

    @property
    def files(self) -> list[str]:
        """Their files, sorted."""
        return sorted({function.file for function in self.functions})

    @property
    def files_for_nothing(self) -> list[str]:
        """Files of which each function was entered for nothing."""
        return sorted(set(self.files) - {function.file for function in self.functions - self.for_nothing})


# -- the run --


@contextmanager
def serving(folder: Path) -> Iterator[int]:
    """Serve the demo model while processes are traced; yields the gateway's port."""
    data, trace, log = folder / "data", folder / "trace", folder / "serve.log"
    trace.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "tools" / "tracing"),
        "PAGESTREAM_TRACE": str(trace),
        "PAGESTREAM_SOURCES": f"{ROOT}/",
    }
    command = [sys.executable, "-m", "pagestream_cli", "serve", "--http-port", "0", "--grpc-port", "0"]
    with log.open("wb") as output:
        serve = subprocess.Popen(
            [*command, "--data-dir", str(data)], env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
        )
    try:
        yield wait_until(lambda: _port(serve, data / "serve.json", log), "the demo model to be served")
    finally:
        serve.send_signal(signal.SIGTERM)
        try:
            serve.wait(LIMIT_S / 4)
        except subprocess.TimeoutExpired:
            serve.kill()  # its parts end with it
            serve.wait()


def _port(serve: subprocess.Popen[bytes], file: Path, log: Path) -> int | None:
    if serve.poll() is not None:
        raise SystemExit(f"paths: serve has ended:\n{log.read_text(errors='replace')[-4000:]}")
    record = json.loads(file.read_text()) if file.exists() else {}
    if not record.get("ready"):
        return None
    return next(int(part["ports"]["http"]) for part in record["processes"] if "http" in part["ports"])


def wait_until(condition: Callable[[], T | None], what: str) -> T:
    """Return what the condition gives once it is neither None nor False."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        result = condition()
        if result is not None and result is not False:
            return result
        time.sleep(0.02)
    raise SystemExit(f"paths: waited {LIMIT_S:g} s for {what}")


def pauses() -> list[float]:
    """Return the seconds before each chat.

    What an earlier one has left to be done is over then, and what happens periodically falls into few of them.
    """
    spread = random.Random(1)
    return [spread.uniform(0.4, 0.8) for _ in range(CHATS)]


def chat(connection: http.client.HTTPConnection, pause_s: float = 0.0) -> tuple[int, int]:
    """Stream one chat; return when it began and ended, in nanoseconds of the monotonic clock."""
    time.sleep(pause_s)
    start = time.monotonic_ns()
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    end = time.monotonic_ns()
    if answer.status != http.HTTPStatus.OK or b"[DONE]" not in text:
        raise SystemExit(f"paths: a chat was answered with {answer.status}: {text[-1000:]!r}")
    return start, end


def traced_chats(folder: Path) -> tuple[list[tuple[int, int]], list[Process]]:
    """Return the times of all traced chats, and what the processes have recorded."""
    with serving(folder) as port:
        trace = folder / "trace"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
        for _ in range(WARM_UPS):
            chat(connection)
        started = {int(file.stem) for file in trace.glob("*.started")}
        (trace / "on").touch()
        wait_until(lambda: _have(started, trace, ".recording"), "all processes to record")
        times = [chat(connection, pause_s) for pause_s in pauses()]
        (trace / "off").touch()
        wait_until(lambda: _have(started, trace, ".json"), "the records of all processes")
        connection.close()
        return times, [read_process(file) for file in sorted(trace.glob("*.json"))]


def _have(pids: Iterable[int], folder: Path, suffix: str) -> bool:
    """Whether each process that still runs has written its file."""
    return all((folder / f"{pid}{suffix}").exists() or not Path(f"/proc/{pid}").exists() for pid in pids)


# -- what was recorded --


def read_process(file: Path) -> Process:
    """Read the records of a process."""
    record = json.loads(file.read_text())
    functions = [(Function(_below_root(path), name, line), *how) for path, name, line, *how in record["outcomes"]]
    by_itself = [
        is_empty and not acts and only_tests(path, function.line, tuple(lines))
        for (path, *_), (function, acts, is_empty, lines) in zip(record["outcomes"], functions, strict=True)
    ]
    calls, sends = [], []
    for thread in record["threads"]:
        done = [each for each in thread if each[3] >= 0]
        idle = for_nothing([(depth, by_itself[outcome]) for _, _, depth, outcome in done])
        calls.append(
            [
                Call(start, end, depth, functions[outcome][0], is_idle)
                for (start, end, depth, outcome), is_idle in zip(done, idle, strict=True)
            ]
        )
        sends.append([start for start, _, _, outcome in thread if outcome == -1])
    return Process(int(file.stem), record["title"], record["parent"], calls, sends)


def _below_root(path: str) -> str:
    return Path(path).relative_to(ROOT).as_posix()


def for_nothing(calls: list[tuple[int, bool]]) -> list[bool]:
    """Return which calls were for nothing: by themselves, and with all calls that they made.

    Args:
        calls: in the order of their beginnings, each with its depth and whether it was for nothing by itself.
    """
    result = [False] * len(calls)
    acting: set[int] = set()  # depths at which a call of the caller that is being looked for has acted
    for place in range(len(calls) - 1, -1, -1):
        depth, by_itself = calls[place]
        result[place] = by_itself and depth + 1 not in acting
        acting = {other for other in acting if other <= depth}
        if not result[place]:
            acting.add(depth)
    return result


@cache
def _functions(path: str) -> dict[int, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return a file's functions by their first lines, which are those of their decorators."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, kinds)]
    return {min([node.lineno, *(each.lineno for each in node.decorator_list)]): node for node in nodes}


def only_tests(path: str, first_line: int, lines: tuple[int, ...]) -> bool:
    """Whether the lines of a function that ran only find out that there is nothing to do."""
    function = _functions(path).get(first_line)
    if function is None:
        return True  # a lambda or comprehension: what it returned and called says enough
    ran = [statement for statement in _statements(function.body) if not _lines(statement).isdisjoint(lines)]
    done = [statement for statement in ran if not _is_empty(statement)]
    parts = [node for statement in done for header in _header(statement) for node in ast.walk(header)]
    return all(_changes_nothing(statement) for statement in done) and (not done or any(map(_is_test, [*done, *parts])))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []))
        for handler in getattr(statement, "handlers", []):
            yield from _statements(handler.body)
        for case in getattr(statement, "cases", []):
            yield from _statements(case.body)


def _header(statement: ast.stmt) -> list[ast.AST]:
    """Return the parts of a statement that its own lines run, without the statements in it."""
    nested = (ast.stmt, ast.ExceptHandler, ast.match_case)
    return [child for child in ast.iter_child_nodes(statement) if not isinstance(child, nested)]


def _lines(statement: ast.stmt) -> set[int]:
    ends = [getattr(part, "end_lineno", None) or statement.lineno for part in _header(statement)]
    last = max([statement.lineno, *ends])
    return set(range(statement.lineno, last + 1))


def _is_empty(statement: ast.stmt) -> bool:
    """Whether it is `pass`, a docstring, or a return of a constant."""
    if isinstance(statement, ast.Return):
        return statement.value is None or isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _changes_nothing(statement: ast.stmt) -> bool:
    suspends = (ast.Await, ast.Yield, ast.YieldFrom)
    if any(isinstance(node, suspends) for header in _header(statement) for node in ast.walk(header)):
        return False
    match statement:
        case ast.If() | ast.Return() | ast.Match():
            return True
        case ast.For(target=ast.Name() | ast.Tuple()) | ast.While():
            return True
        case ast.Assign(targets=[target]):
            return isinstance(target, ast.Name) or _names_alone(target) or _empties(statement)
        case ast.AnnAssign(target=ast.Name()):
            return True
    return False


def _names_alone(target: ast.expr) -> bool:
    return isinstance(target, ast.Tuple) and all(isinstance(each, ast.Name) for each in target.elts)


def _empties(statement: ast.stmt) -> bool:
    """Whether it is `taken, self.new = self.new, []`."""
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name(), ast.Attribute() as written])],
            value=ast.Tuple(elts=[ast.Attribute() as read, value]),
        ):
            is_empty = isinstance(value, ast.List | ast.Tuple | ast.Dict) and not ast.dump(value).count("Constant")
            return is_empty and ast.unparse(written) == ast.unparse(read)
    return False


def _is_test(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("bool", "len", "any", "all")
    tests = (ast.If, ast.IfExp, ast.BoolOp, ast.Compare, ast.Not, ast.For, ast.comprehension, ast.While, ast.Match)
    return isinstance(node, tests) or (isinstance(node, ast.stmt) and _empties(node))


# -- the paths --


def crossing(passes: list[list[Call]]) -> Crossing:
    """Return what most of the passes through a path have crossed."""
    entered: Counter[Function] = Counter()
    acted: Counter[Function] = Counter()
    for calls in passes:
        entered.update({call.function for call in calls})
        acted.update({call.function for call in calls if not call.is_for_nothing})
    most = len(passes) / 2
    functions = frozenset(each for each, count in entered.items() if count > most and _counts(each))
    return Crossing(functions, frozenset(each for each in functions if acted[each] <= most))


def _counts(function: Function) -> bool:
    return "<" not in function.name.rpartition(".")[2]


def steps(processes: list[Process]) -> list[list[Call]]:
    """Return the calls of each step whose report was sent before the next step began."""
    passes = []
    for process in processes:
        children = [other for other in processes if other.parent == process.pid]
        for calls, sends in zip(process.calls, process.sends, strict=True):
            begun = [call for call in calls if call.function.name == STEP]
            for step, following in pairwise(begun):
                end = next((sent for sent in sends if step.end <= sent <= following.start), None)
                if end is not None:
                    others = [call for child in children for thread in child.calls for call in thread]
                    passes.append(_within([*calls, *others], step.start, end))
    return passes


def _within(calls: list[Call], start: int, end: int) -> list[Call]:
    return [call for call in calls if start <= call.start <= end]


class Tree(NamedTuple):
    """A call that no function of the product has made, with all calls below it."""

    functions: frozenset[Function]
    calls: list[Call]


def trees_of(thread: list[Call]) -> list[Tree]:
    """Divide the calls of a thread, which are in the order of their beginnings."""
    trees: list[list[Call]] = []
    for call in thread:
        if call.depth == 0 or not trees:
            trees.append([])
        trees[-1].append(call)
    return [Tree(frozenset(call.function for call in calls), calls) for calls in trees]


def chats(processes: list[Process], times: list[tuple[int, int]]) -> dict[str, Crossing]:
    """Return the crossing of each kind of process, by its title, and of all together.

    A tree is no part of a chat where such a one is called in most of the times between chats, of the same lengths.
    """
    by_title: defaultdict[str, list[list[Call]]] = defaultdict(lambda: [[] for _ in times])
    before = [(2 * start - end, start) for start, end in times]
    for process in processes:
        trees = [tree for thread in process.calls for tree in trees_of(thread)]
        idle = Counter(each for span in before for each in {tree.functions for tree in _begun_within(trees, *span)})
        for number, span in enumerate(times):
            for tree in _begun_within(trees, *span):
                if idle[tree.functions] <= len(times) / 2:
                    by_title[process.title][number] += tree.calls
                    by_title["all"][number] += tree.calls
    crossings = {title: crossing(passes) for title, passes in by_title.items()}
    return {title: crossed for title, crossed in sorted(crossings.items()) if crossed.functions}


def _begun_within(trees: list[Tree], start: int, end: int) -> list[Tree]:
    return [tree for tree in trees if start <= tree.calls[0].start <= end]


# -- what is shown --


def table(step: Crossing, by_title: dict[str, Crossing]) -> str:
    """Return the table of figures, in Markdown."""
    rows = [("one decode step", step)]
    rows += [(f"one streamed chat: `{title}`", crossed) for title, crossed in by_title.items() if title != "all"]
    rows.append(("one streamed chat: all processes", by_title["all"]))
    lines = ["| path | files | functions | files for nothing | functions for nothing |", "|---|---:|---:|---:|---:|"]
    for name, each in rows:
        figures = (each.files, each.functions, each.files_for_nothing, each.for_nothing)
        lines.append(f"| {name} | " + " | ".join(str(len(figure)) for figure in figures) + " |")
    return "\n".join(lines)


def listed(crossed: Crossing) -> str:
    """Return the files with the functions entered; those entered for nothing stand in parentheses."""
    lines = []
    for file in crossed.files:
        functions = sorted((each for each in crossed.functions if each.file == file), key=lambda each: each.line)
        names = [f"({each.name})" if each in crossed.for_nothing else each.name for each in functions]
        lines.append(f"  {file}: {', '.join(names)}")
    return "\n".join(lines)


def written(page: str, text: str) -> str:
    """Return a page with the text between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"paths: expected {BEGIN} and {END} in {PAGE.relative_to(ROOT)}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files and functions by name")
    parser.add_argument("--no-write", action="store_true", help="leave docs/architecture.md as it is")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that serve is ended, and the folder removed
    with tempfile.TemporaryDirectory(prefix="pagestream-paths-", ignore_cleanup_errors=True) as folder:
        times, processes = traced_chats(Path(folder))
    passes = steps(processes)
    if not passes:
        raise SystemExit(f"paths: no process has called {STEP}")
    step, by_title = crossing(passes), chats(processes, times)
    text = table(step, by_title)
    print(text)
    if arguments.list:
        print(f"\none decode step, most of {len(passes)}:\n{listed(step)}")
        for title, crossed in by_title.items():
            if title != "all":
                print(f"\none streamed chat, {title}:\n{listed(crossed)}")
    if not arguments.no_write:
        PAGE.write_text(written(PAGE.read_text(), text))


if __name__ == "__main__":
    main()
