"""Measure how many faults `make test` notices: mutants drawn by seed, each run against the tests that cover its line.

    mutants.py map --state DIR [--checkout DIR] [PATH...]   coverage of the tests, by test and line, of all processes
    mutants.py run --state DIR [--checkout DIR] [--count 120] [--seed 1] [--from DRAWN] [--jobs 1]
    mutants.py report --state DIR                            the share that is caught, survivors, coverage by package
    mutants.py unique --state DIR                            lines that one test file alone covers

Everything is kept in the state's folder, so that `map` and `run` go on where they were interrupted, or where --minutes
were over. The tests run in copies of the checkout within that folder, with the checkout's .venv and an editable mapping
of their own: the working tree is only read. One state belongs to one tree; `--from` takes the mutants that another
state has drawn, and finds them again by the text of their function, in whatever file that is now.

A process that is killed loses up to a second of its coverage. Lines that ran in a server are attributed to the test
that ran at that time. A mutant of a Lua script is run against the tests that cover the functions which call the script.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import itertools
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.mutation.operators import Mutant, draw, mutants_of

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = Path(__file__).resolve().parent / "mutation"
AREAS = {
    "scheduler": r"/pagestream_engine/scheduler/",
    "cache": r"/pagestream_engine/(kv_)?cache/",
    "grammar": r"/pagestream_engine/(features/)?grammar/",
    "sampler": r"/pagestream_engine/sampler/",
    "scripts": r"\.lua$",
    "streams, engine's side": r"/pagestream_streams/engine/.*\.py$",
    "streams, gateway's side": r"/pagestream_streams/gateway/.*\.py$",
    "worker": r"/pagestream_worker/",
    "gateway's answers": r"/pagestream_(gateway/(openai|anthropic|grpc|output_formats)|grammars/output_formats)/",
    "operator": r"/pagestream_operator/",
}
"""The files of each area that mutants are drawn from in equal numbers."""
TESTS = ("tests",)
SELECT = "not slow and not gpu and not cluster"
LIMIT_S = 120.0
"""Of a mutant's tests, by the times that they took without it; what covers the line beyond that is not run."""
LATEST_S = 150.0
"""No test of a mutant begins later."""
TEST_LIMIT_S = 60
"""Of one test, which then has failed."""
SLOW_S = 20.0
"""A test that fails after so many seconds is run without the mutant, too."""
STARTING_S = 60.0
"""Of a run of pytest, for imports and fixtures that no test's time has."""


@dataclass
class CoverMap:
    """Which tests cover which lines."""

    tests: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)
    lines: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    """By file and line: a bit for each test."""
    arcs: dict[str, set[tuple[int, int]]] = field(default_factory=lambda: defaultdict(set))

    def add(self, part: Mapping[str, Any]) -> None:
        """Add what one run of pytest has covered."""
        shift = len(self.tests)
        self.tests += part["tests"]
        self.seconds += part["seconds"]
        self.outcomes += part["outcomes"]
        for file, lines in part["lines"].items():
            for line, bits in lines.items():
                self.lines[file][int(line)] |= int(bits, 16) << shift
        for file, arcs in part["arcs"].items():
            self.arcs[file].update((start, end) for start, end in arcs)

    @cached_property
    def num_lines(self) -> Counter[int]:
        """By test: the lines that it covers."""
        counts: Counter[int] = Counter()
        equal = Counter(bits for lines in self.lines.values() for bits in lines.values())
        for bits, count in equal.items():
            for test in _bits(bits):
                counts[test] += count
        return counts

    def covering(self, file: str, lines: Iterable[int]) -> list[int]:
        """Return the tests that pass and cover one of the lines."""
        bits = 0
        for line in lines:
            bits |= self.lines.get(file, {}).get(line, 0)
        return [place for place in _bits(bits) if self.outcomes[place] == "passed"]


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


# -- copies of a checkout --


class Scratch:
    """A copy of a checkout, with an environment whose editable packages are the copy's."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.folder = folder
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            self._copy(checkout)
            self._link_environment(checkout / ".venv", folder / ".venv", checkout)
            (folder / ".complete").touch()
        site = next((folder / ".venv" / "lib").glob("python*/site-packages"))
        for module in ("mutant_cover", "mutant_pytest"):
            shutil.copy(PLUGINS / f"{module}.py", site)
        (site / "a0_mutants.pth").write_text("import mutant_cover\n")

    def _copy(self, checkout: Path) -> None:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=checkout, check=True, capture_output=True).stdout.decode()
        for name in filter(None, listed.split("\0")):
            source, target = checkout / name, self.folder / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target, follow_symlinks=False)
        for command in (["git", "init", "-q"], ["git", "add", "-A"]):  # tests list the files that git knows
            subprocess.run(command, cwd=self.folder, check=True)

    def _link_environment(self, original: Path, copy: Path, checkout: Path) -> None:
        """Link an environment's packages; write its programs and editable mappings anew."""
        copy.mkdir()
        shutil.copy(original / "pyvenv.cfg", copy)
        site = next((original / "lib").glob("python*/site-packages"))
        own_site = copy / site.relative_to(original)
        own_site.mkdir(parents=True)
        for entry in site.iterdir():
            target = own_site / entry.name
            if entry.suffix == ".pth" and str(checkout) in entry.read_text():
                target.write_text(entry.read_text().replace(str(checkout), str(self.folder)))
            elif entry.name != "__pycache__":
                target.symlink_to(entry)
        (copy / "bin").mkdir()
        for program in (original / "bin").iterdir():
            target = copy / "bin" / program.name
            if program.is_symlink():
                target.symlink_to(program.readlink())
                continue
            first, _, rest = program.read_bytes().partition(b"\n")
            if first.startswith(b"#!") and str(original).encode() in first:
                target.write_bytes(first.replace(str(original).encode(), str(copy).encode()) + b"\n" + rest)
                target.chmod(0o755)
            else:
                target.symlink_to(program)

    def pytest(
        self, arguments: Sequence[str], variables: Mapping[str, str], limit_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run pytest in the copy. TimeoutExpired after `limit_s` seconds; its processes are killed."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **variables}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [
            ".venv/bin/python",
            "-m",
            "pytest",
            "-q",
            "-p",
            "mutant_pytest",
            "-p",
            "no:cacheprovider",
            *arguments,
        ]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as running:
            try:
                output, _ = running.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                running.kill()  # what it has started ends with it
                raise
        return subprocess.CompletedProcess(command, running.returncode, output)


# -- the map --


class State:
    """The folder of a measurement."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)

    def scratch(self, checkout: Path, number: int = 0) -> Scratch:
        """Return a copy of the checkout."""
        return Scratch(checkout.resolve(), self.folder / f"scratch-{number}")

    def parts(self) -> list[Path]:
        """Return the files of the map."""
        return sorted(self.folder.glob("map-*.json.gz"))

    def cover_map(self) -> CoverMap:
        """Return the whole map."""
        result = CoverMap()
        for part in self.parts():
            with gzip.open(part, "rt") as file:
                result.add(json.load(file))
        return result

    def mapped(self) -> set[str]:
        """Return the tests that the map has."""
        return set(self.cover_map().tests)

    @property
    def results(self) -> Path:
        """One JSON object a line for each mutant that was run."""
        return self.folder / "results.jsonl"

    @property
    def drawn(self) -> Path:
        """The mutants that were drawn."""
        return self.folder / "drawn.json"


def map_tests(state: State, checkout: Path, paths: Sequence[str], select: str, minutes: float) -> bool:
    """Run tests under coverage for so many minutes; return whether the map has all of them."""
    scratch = state.scratch(checkout)
    choice = ["-m", select, *(paths or TESTS)]
    listed = scratch.pytest(["--collect-only", *choice], {"MUTANTS_LOG": os.devnull})
    tests = [line for line in listed.stdout.splitlines() if "::" in line and not line.startswith("ERROR")]
    if not tests:
        raise SystemExit(f"mutants: no tests:\n{listed.stdout[-3000:]}")
    done = state.mapped()
    missing = [test for test in tests if test not in done]
    print(f"{len(tests)} tests, {len(missing)} to be run", flush=True)
    if not missing:
        return True
    with tempfile.TemporaryDirectory(dir=state.folder) as name:
        folder = Path(name)
        (folder / "select").write_text("\n".join(missing))
        log = folder / "log"
        log.touch()
        variables = {
            "MUTANTS_COVER": str(folder),
            "MUTANTS_ROOT": str(scratch.folder),
            "MUTANTS_PYTEST": "1",
            "MUTANTS_SELECT": str(folder / "select"),
            "MUTANTS_LOG": str(log),
            "MUTANTS_LIMIT_S": str(60 * minutes),
        }
        ran = scratch.pytest(choice, variables)
        part = read_part(folder, log, scratch.folder)
        print(ran.stdout[-1500:], f"{len(part['tests'])} tests run", flush=True)
        if not part["tests"]:
            raise SystemExit("mutants: no test was run")
        target = state.folder / f"map-{len(state.parts()):03}.json.gz"
        with gzip.open(target.with_suffix(".new"), "wt") as file:
            json.dump(part, file)
        target.with_suffix(".new").replace(target)
    return len(part["tests"]) >= len(missing)


def read_part(folder: Path, log: Path, root: Path) -> dict[str, Any]:
    """Return what all processes of a run have covered, with the outcomes of its tests."""
    runs = [json.loads(line) for line in log.read_text().splitlines()]
    places = {test: place for place, (test, _, _) in enumerate(runs)}
    lines: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    arcs: defaultdict[str, set[tuple[int, int]]] = defaultdict(set)
    for data in folder.glob("*.cov"):
        with sqlite3.connect(data) as database:
            query = (
                "select file.path, context.context, arc.fromno, arc.tono from arc"
                " join file on file.id = arc.file_id join context on context.id = arc.context_id"
            )
            try:
                rows = database.execute(query).fetchall()
            except sqlite3.DatabaseError:
                continue  # its process was killed before it had saved anything
        for path, context, start, end in rows:
            file = Path(path).relative_to(root).as_posix()
            arcs[file].add((start, end))
            place = places.get(context)
            if place is not None:
                for line in (start, end):
                    if line > 0:
                        lines[file][line] |= 1 << place
    return {
        "tests": [test for test, _, _ in runs],
        "outcomes": [outcome for _, outcome, _ in runs],
        "seconds": [seconds for _, _, seconds in runs],
        "lines": {file: {line: f"{bits:x}" for line, bits in each.items()} for file, each in lines.items()},
        "arcs": {file: sorted(each) for file, each in arcs.items()},
    }


# -- mutants --


def sources_of(root: Path) -> dict[str, tuple[str, bytes]]:
    """Return the area and source of each file that mutants are drawn from."""
    found = {}
    for below in ("services", "operator"):
        for path in sorted((root / below).glob("**/src/**/*")):
            file = path.relative_to(root).as_posix()
            area = next((area for area, pattern in AREAS.items() if re.search(pattern, f"/{file}")), None)
            if area is not None and path.suffix in (".py", ".lua") and "_pb2" not in path.name:
                found[file] = area, path.read_bytes()
    return found


def drawn_mutants(
    sources: Mapping[str, tuple[str, bytes]], count: int, seed: int, earlier: Path | None
) -> list[Mutant]:
    """Draw mutants of all areas in equal numbers, or find those again that were drawn in another tree."""
    candidates: defaultdict[str, list[Mutant]] = defaultdict(list)
    for file, (area, source) in sources.items():
        candidates[area] += mutants_of(area, file, source)
    if earlier is not None:
        by_key = {each.key: each for area in candidates.values() for each in area}
        keys = [each["key"] for each in json.loads(earlier.read_text())]
        print(f"{sum(key in by_key for key in keys)} of {len(keys)} mutants were found again")
        return [by_key[key] for key in keys if key in by_key]
    texts = {file: source for file, (_, source) in sources.items()}
    shares = [count // len(AREAS) + (number < count % len(AREAS)) for number in range(len(AREAS))]
    by_area = [draw(candidates[area], texts, share, seed) for area, share in zip(AREAS, shares, strict=True)]
    # By turns, so that a run that is interrupted has measured all areas.
    return [each for turn in itertools.zip_longest(*by_area) for each in turn if each is not None]


def lines_of(mutant: Mutant, root: Path) -> dict[str, set[int]]:
    """Return the lines, by file, one of which a test must cover that may notice the mutant."""
    if not mutant.file.endswith(".lua"):
        tree = ast.parse((root / mutant.file).read_bytes())
        around = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.stmt) and node.lineno <= mutant.line <= (node.end_lineno or node.lineno)
        ]
        return {mutant.file: {mutant.line, max(each.lineno for each in around)}}
    folder = (root / mutant.file).parent
    while folder.parent.name != "src":
        folder = folder.parent
    return lines_of_callers(root / mutant.file, root, sorted(folder.rglob("*.py")), sorted(folder.rglob("*.lua")))


def lines_of_callers(script: Path, root: Path, modules: Sequence[Path], scripts: Sequence[Path]) -> dict[str, set[int]]:
    """Return the lines that call a script; of one that is loaded before all others: that call any.

    A script is loaded as `NAME = load("path/of/script")`, and the functions that call it use that name.
    """
    trees = {file: ast.parse(file.read_bytes()) for file in modules}
    loads = [
        (node.targets[0].id, each.value)
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Call)
        for each in ast.walk(node.value)
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value
    ]

    def names_for(wanted: Iterable[Path]) -> set[str]:
        return {name for name, path in loads for file in wanted if file.as_posix().endswith(f"/{path}.lua")}

    names = names_for([script]) or names_for(scripts)
    found: defaultdict[str, set[int]] = defaultdict(set)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute) and (
                (node.id if isinstance(node, ast.Name) else node.attr) in names
            ):
                found[file.relative_to(root).as_posix()].add(node.lineno)
    return found


def run_mutants(state: State, checkout: Path, mutants: Sequence[Mutant], *, jobs: int, minutes: float) -> bool:
    """Run the drawn mutants for so many minutes; return whether all have been run."""
    until = time.monotonic() + 60 * minutes
    copies: SimpleQueue[Scratch] = SimpleQueue()
    for number in range(jobs):
        scratch = state.scratch(checkout, number)
        for file in {each.file for each in mutants}:  # a run that was killed has left its mutant
            if (source := (checkout / file).read_bytes()) != (scratch.folder / file).read_bytes():
                _write(scratch.folder / file, source)
        copies.put(scratch)
    cover = state.cover_map()
    results = {each["key"]: each for each in read_results(state)}
    pending = [each for each in mutants if not is_final(results.get(each.key), each, checkout, cover)]

    def run(mutant: Mutant) -> None:
        if time.monotonic() > until:
            return
        scratch = copies.get()
        try:
            result = run_mutant(mutant, (checkout / mutant.file).read_bytes(), scratch, cover)
        finally:
            copies.put(scratch)
        with state.results.open("a") as file:
            file.write(
                json.dumps({"key": mutant.key, "area": mutant.area, "mutant": str(mutant), **asdict(result)}) + "\n"
            )
        print(f"{result.outcome} ({result.by or result.num_tests}, {result.seconds:.0f} s): {mutant}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, pending))
    results = {each["key"]: each for each in read_results(state)}
    return all(is_final(results.get(each.key), each, checkout, cover) for each in mutants)


def is_final(result: Mapping[str, Any] | None, mutant: Mutant, checkout: Path, cover: CoverMap) -> bool:
    """Whether a mutant need not be run: it was caught, or the map has no more tests that cover it than it had then."""
    if result is None or result["outcome"] == "caught":
        return result is not None
    return bool(len(covering(mutant, checkout, cover)) <= result["num_covering"])


@dataclass
class Result:
    """What became of a mutant."""

    outcome: str
    """caught; survived; uncovered: no test covers it; beyond: those that the limit allows pass, others cover it."""
    by: str = ""
    """The test that caught it."""
    num_tests: int = 0
    """That were chosen."""
    num_covering: int = 0
    seconds: float = 0.0


def run_mutant(mutant: Mutant, source: bytes, scratch: Scratch, cover: CoverMap) -> Result:
    """Run the tests that cover a mutant until one fails."""
    started = time.monotonic()
    tests = covering(mutant, scratch.folder, cover)
    if not tests:
        return Result("uncovered")
    chosen = within_limit(tests, cover) or tests[:1]
    names = by_files([cover.tests[test] for test in chosen])
    by, is_whole = caught_by(names, scratch, scratch.folder / mutant.file, source, mutant.applied(source))
    outcome = "caught" if by else "survived" if is_whole and len(chosen) == len(tests) else "beyond"
    return Result(outcome, by, len(chosen), len(tests), time.monotonic() - started)


def covering(mutant: Mutant, root: Path, cover: CoverMap) -> list[int]:
    """Return the tests that may notice a mutant."""
    return sorted({test for file, lines in lines_of(mutant, root).items() for test in cover.covering(file, lines)})


def within_limit(tests: Sequence[int], cover: CoverMap) -> list[int]:
    """Return as many tests as the limit allows: first those that cover fewest lines, which check them most closely."""
    chosen, left_s = [], LIMIT_S
    for test in sorted(tests, key=lambda each: (cover.num_lines[each], cover.seconds[each])):
        if cover.seconds[test] <= left_s:
            chosen.append(test)
            left_s -= cover.seconds[test]
    return chosen


def by_files(tests: Sequence[str]) -> list[str]:
    """Return tests with those of a file together, the files in the order of their first tests."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for test in tests:
        files[test.partition("::")[0]].append(test)
    return [test for each in files.values() for test in each]


_written = itertools.count(1)


def _write(file: Path, source: bytes) -> None:
    """Write a source with a time of its own: compiled modules are known by times of whole seconds."""
    file.write_bytes(source)
    moment = int(time.time()) - 10_000_000 + next(_written)
    os.utime(file, (moment, moment))


def caught_by(tests: Sequence[str], scratch: Scratch, file: Path, source: bytes, mutated: bytes) -> tuple[str, bool]:
    """Return the test that fails because of a mutant; empty: none. And whether all have been run."""

    def run(tests: Sequence[str], text: bytes) -> Run:
        _write(file, text)
        try:
            return run_until_failure(tests, scratch)
        finally:
            _write(file, source)

    left = list(tests)
    while left:
        first = run(left, mutated)
        if not first.failed:
            return "", first.is_whole
        is_test = first.failed in left
        again = [first.failed] if is_test else left[:1]
        # What fails late, or as a whole, may have been too slow for a limit: then it fails without the mutant, too.
        if run(again, mutated).failed and ((is_test and first.seconds < SLOW_S) or not run(again, source).failed):
            return first.failed, first.is_whole
        if not is_test:
            return "", False
        left = left[left.index(first.failed) + 1 :]
    return "", True


@dataclass
class Run:
    """A run of tests up to the first that fails."""

    failed: str
    """A test, or a word for a run that has failed as a whole; empty: none."""
    seconds: float
    """That it took."""
    is_whole: bool
    """Whether all have been run."""


def run_until_failure(tests: Sequence[str], scratch: Scratch) -> Run:
    """Run tests in their order until one fails."""
    with tempfile.TemporaryDirectory(dir=scratch.folder.parent) as name:
        folder = Path(name)
        (folder / "select").write_text("\n".join(tests))
        log = folder / "log"
        log.touch()
        latest_s = LATEST_S if len(tests) > 1 else 0.0
        variables = {
            "MUTANTS_SELECT": str(folder / "select"),
            "MUTANTS_LOG": str(log),
            "MUTANTS_LIMIT_S": str(latest_s),
        }
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        limit_s = latest_s + TEST_LIMIT_S + STARTING_S
        try:
            ran = scratch.pytest(["-x", f"--timeout={TEST_LIMIT_S}", *files], variables, limit_s)
        except subprocess.TimeoutExpired:
            return Run("(the run hangs)", limit_s, is_whole=False)
        runs = [json.loads(line) for line in log.read_text().splitlines()]
        failed, seconds = next(((test, took) for test, outcome, took in runs if outcome == "failed"), ("", 0.0))
        if not failed and (ran.returncode not in (0, 2) or not runs):
            failed = "(the run fails before its first test)"
        return Run(failed, seconds, len(runs) >= len(tests))


# -- what was measured --


def read_results(state: State) -> list[dict[str, Any]]:
    """Return the latest result of each mutant so far."""
    lines = state.results.read_text().splitlines() if state.results.exists() else []
    return list({each["key"]: each for each in map(json.loads, lines)}.values())


def report(state: State) -> str:
    """Return the shares that were caught, survivors, and the coverage of each package, in Markdown."""
    results = read_results(state)
    lines = ["| area | mutants | caught | survived | uncovered | beyond the limit | share caught |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for area in [*AREAS, "all"]:
        counts = Counter(each["outcome"] for each in results if area in (each["area"], "all"))
        total = sum(counts.values())
        figures = [str(counts[outcome]) for outcome in ("caught", "survived", "uncovered", "beyond")]
        share = f"{100 * counts['caught'] / total:.0f} %" if total else ""
        lines.append(f"| {area} | {total} | {' | '.join(figures)} | {share} |")
    lines += ["", "Not caught:", ""]
    lines += [f"- {each['outcome']}: `{each['mutant']}`" for each in results if each["outcome"] != "caught"]
    if state.parts():
        lines += ["", *coverage_table(state)]
    return "\n".join(lines)


def coverage_table(state: State) -> list[str]:
    """Return the lines and branches that the map covers, by package."""
    import coverage

    cover, root = state.cover_map(), state.folder / "scratch-0"
    with tempfile.TemporaryDirectory(dir=state.folder) as name:
        data = coverage.CoverageData(f"{name}/data")
        data.add_arcs({str(root / file): arcs for file, arcs in cover.arcs.items()})
        sources = [*root.glob("services/*/src/**/*.py"), *root.glob("operator/src/**/*.py")]
        data.touch_files([str(path) for path in sources])
        data.write()
        whole = coverage.Coverage(f"{name}/data", config_file=False, branch=True)
        whole.load()
        whole.json_report(outfile=f"{name}/report.json")
        files = json.loads(Path(f"{name}/report.json").read_text())["files"]
    totals: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for file, figures in files.items():
        package = next((part for part in Path(file).parts if part.startswith("pagestream_")), "pagestream")
        for each in (package, "all"):
            totals[each].update({key: value for key, value in figures["summary"].items() if isinstance(value, int)})
    lines = ["| package | lines | covered | branches | covered |", "|---|---:|---:|---:|---:|"]
    for package in sorted(totals, key=lambda each: (each == "all", each)):
        total = totals[package]
        shares = [
            f"{100 * total[covered] / max(1, total[of]):.1f} %"
            for covered, of in (("covered_lines", "num_statements"), ("covered_branches", "num_branches"))
        ]
        lines.append(f"| {package} | {total['num_statements']} | {shares[0]} | {total['num_branches']} | {shares[1]} |")
    return lines


def unique_lines(state: State, checkout: Path) -> str:
    """Return how many lines of functions each test file covers, and how many it alone: by number where under 40."""
    cover = state.cover_map()
    files = sorted({test.partition("::")[0] for test in cover.tests})
    alone: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    covered: Counter[str] = Counter()
    for file, lines in cover.lines.items():
        in_functions = lines_in_functions(checkout / file)
        for line, bits in sorted(lines.items()):
            if line not in in_functions:
                continue  # runs when its module is imported
            tests = {cover.tests[place].partition("::")[0] for place in _bits(bits)}
            covered.update(tests)
            if len(tests) == 1:
                alone[tests.pop()][file].append(line)
    seconds: defaultdict[str, float] = defaultdict(float)
    for test, duration in zip(cover.tests, cover.seconds, strict=True):
        seconds[test.partition("::")[0]] += duration
    result = ["# lines that this file alone covers / lines that it covers / seconds with coverage / file"]
    for file in files:
        count = sum(map(len, alone[file].values()))
        result.append(f"{count:5} {covered[file]:6} {seconds[file]:7.1f} {file}")
        if count < 40:
            result += [
                f"        {source}: {' '.join(map(str, lines))}" for source, lines in sorted(alone[file].items())
            ]
    return "\n".join(result)


def lines_in_functions(path: Path) -> set[int]:
    """Return the lines of the bodies of all functions of a module."""
    nodes = ast.walk(ast.parse(path.read_bytes())) if path.exists() else iter(())
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {line for node in functions for line in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)}


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("map", "run", "report", "unique"))
    parser.add_argument("paths", nargs="*", help="of tests, for map (default: tests)")
    parser.add_argument("--state", type=Path, required=True, help="folder of the measurement")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="with its own .venv (default: this one)")
    parser.add_argument("--select", default=SELECT, metavar="MARKS", help="tests of the map (default: %(default)s)")
    parser.add_argument("--count", type=int, default=120, help="mutants of all areas together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--from", type=Path, dest="earlier", metavar="DRAWN", help="drawn.json of another state")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run at once, each in its own copy")
    parser.add_argument("--areas", nargs="+", choices=AREAS, metavar="AREA", help="to be run (default: all)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after this time")
    given = parser.parse_intermixed_args()
    state, checkout = State(given.state), given.checkout.resolve()
    match given.verb:
        case "map":
            is_done = map_tests(state, checkout, given.paths, given.select, given.minutes)
        case "run":
            mutants = drawn_mutants(sources_of(checkout), given.count, given.seed, given.earlier)
            listed = [{"key": each.key, "area": each.area, "mutant": str(each)} for each in mutants]
            state.drawn.write_text(json.dumps(listed, indent=1))
            chosen = [each for each in mutants if each.area in (given.areas or AREAS)]
            is_done = run_mutants(state, checkout, chosen, jobs=given.jobs, minutes=given.minutes)
        case "report":
            print(report(state))
            return 0
        case _:
            print(unique_lines(state, checkout))
            return 0
    print("done" if is_done else "interrupted: run the same command again to go on")
    return 0 if is_done else 3


if __name__ == "__main__":
    sys.exit(main())
