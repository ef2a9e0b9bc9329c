"""Valid requests with fields at their limits, beside a greedy stream: none ends the engine, and none holds it up.

    make hostile ARGS="--requests 20000 --seed 1"
    make hostile ARGS="--requests 20000 --seed 1 --part 3/40 --results build/hostile.jsonl"

`pagestream serve` with the demo model in several configurations (`hostile_requests/configurations.py`), one after the
other. Each request has 2 to 7 of all fields of its operation at their limits; the fields come from the gateway's
OpenAPI document, so that a new one is tried without a change here. Request N of a seed is always the same. Some clients
leave in the middle. Meanwhile a canary reads greedy streams, which it has read alone before.

Wanted: no death of an engine, no gap of the canary over 2 s, its tokens as they were alone and its ITL's p99 at most 3
times that, no error of the server, an answer to everything within 60 s, and nothing left over. What is found is printed
and written to a file each, with the requests that ran at that time; `--replay FILE` sends those alone.

With `--part K/N` a run sends each engine every N-th request, and `--results FILE` gets a line of each engine: parts may
run in any order and at any time, one that is run again replaces its earlier line, and `--table` prints the sum.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
import psutil
from campaigns.hostile_requests.canary import ALONE
from campaigns.hostile_requests.configurations import CONFIGURATIONS, Attacked, make_adapters, running
from campaigns.hostile_requests.requests import HostileRequest, Requests
from campaigns.hostile_requests.results import MOST_GAP_MS, Row, append, read, table
from campaigns.hostile_requests.sending import Answer, sent
from campaigns.malformed_inputs.process import defects_in, unfinished_requests
from pagestream_streams.tasks import cancel
from support.processes.part import StackError
from support.processes.waiting import descendants_of, is_running

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
"""Seconds until the canary has read its first streams, and until a new engine serves."""
KEPT_S = 5.0
"""Seconds for which requests that have ended are remembered, since what they did may show later."""
WATCH_S = 0.5
SHOWN = 2000
PATIENCE = 2.0
"""How many times the limit is waited for an answer, to tell late ones from none."""


@dataclass
class Flights:
    """The requests that run, and those that have just ended."""

    running: dict[int, tuple[float, HostileRequest]] = field(default_factory=dict)
    ended: list[tuple[float, float, HostileRequest]] = field(default_factory=list)

    def end(self, number: int) -> None:
        """Take an end."""
        begun, request = self.running.pop(number)
        now = time.time()
        self.ended = [each for each in self.ended if each[1] > now - 60.0] + [(begun, now, request)]

    def around(self, first: float, last: float) -> list[HostileRequest]:
        """Return the requests that ran at some time between two."""
        ended = [request for begun, end, request in self.ended if end >= first - KEPT_S and begun <= last]
        return ended + [request for begun, request in self.running.values() if begun <= last]


class Attack:
    """The requests of one configuration, and what came of them."""

    def __init__(self, name: str, attacked: Attacked, options: argparse.Namespace) -> None:
        self._name, self._attacked, self._options = name, attacked, options
        self._flights = Flights()
        self.row = Row()
        self.findings: list[str] = []

    async def run(self, numbers: Iterator[int], requests: Sequence[HostileRequest], until: float) -> None:
        """Send the given requests, or else those of some numbers, beside the canary."""
        async with httpx.AsyncClient(base_url=self._attacked.url, timeout=30.0) as client:
            document = (await client.get("/openapi.json")).json()
        made = Requests(document, self._attacked.target, f"{self._options.seed}/{self._name}", self._options.work)
        queue = iter(requests) if requests else (made.request(number) for number in numbers)
        canary = await self._start_canary()
        watch = asyncio.create_task(self._watch())
        try:
            limits, url, limit_s = (
                httpx.Limits(max_connections=None),
                self._attacked.url,
                2 * PATIENCE * self._options.limit_s,
            )
            begun, before = time.monotonic(), self._cpu_s(canary)
            async with httpx.AsyncClient(base_url=url, timeout=limit_s, limits=limits) as client:
                async with asyncio.TaskGroup() as tasks:
                    for _ in range(len(requests) or self._options.jobs):
                        tasks.create_task(self._send(client, queue, until))
            await self._settle()
            self.row.seconds, after = time.monotonic() - begun, self._cpu_s(canary)
            self.row.cpu_s.update({name: seconds - before.get(name, 0.0) for name, seconds in after.items()})
        finally:
            await cancel(watch)
            await self._end_canary(canary)
        for process in self._attacked.served.record.processes:
            for line in defects_in(Path(process.log))[:5] if process.log else ():
                self._report(f"{process.name} logged {line[:SHOWN]}", ())

    def _cpu_s(self, canary: asyncio.subprocess.Process) -> dict[str, float]:
        """Return the processor time of each process since it started, the engine's with those below it."""
        record = self._attacked.served.record
        pids = {name: each.pid for each in record.processes if (name := each.name.partition("-")[0]) != "serve"}
        return {name: _cpu_s_of(pid) for name, pid in {**pids, "canary": canary.pid, "client": os.getpid()}.items()}

    async def _send(self, client: httpx.AsyncClient, queue: Iterator[HostileRequest], until: float) -> None:
        limit_s = self._options.limit_s
        for request in queue:
            self._flights.running[request.number] = (time.time(), request)
            try:
                answer: Answer = await sent(client, request, PATIENCE * limit_s)
            finally:
                self._flights.end(request.number)
            found = self.row.add(answer, limit_s)
            if self._options.verbose or found:
                said = answer.error or answer.text
                print(f"{request.number} {request.path} {answer.status} {answer.seconds:.2f} s {said}", flush=True)
            if found:
                self._report(found, [request])
            if time.monotonic() > until:
                return

    async def _watch(self) -> None:
        """Count the ends of processes of the engine until cancelled."""

        def engine() -> tuple[int, list[int]]:
            try:
                process = self._attacked.served.process("engine-0")
            except StackError:
                return -1, []
            return process.restarts, [process.pid, *descendants_of(process.pid)] if process.pid else []

        restarts, parts = engine()
        while True:
            await asyncio.sleep(WATCH_S)
            found, now = engine()
            if found != restarts or not all(map(is_running, parts)):
                self.row.deaths += 1
                moment = time.time()
                self._report("a process of the engine has ended", self._flights.around(moment - KEPT_S, moment))
                async with asyncio.timeout(LIMIT_S):
                    while len(now) < len(parts) or not all(map(is_running, now)):
                        await asyncio.sleep(WATCH_S)
                        found, now = engine()
            restarts, parts = found, now

    async def _settle(self) -> None:
        """Wait until nothing but the canary runs."""
        url = self._attacked.served.record.redis_url
        end = time.monotonic() + self._options.limit_s
        while len(left := await unfinished_requests(url)) > 1:
            if time.monotonic() > end:
                self.row.left_over = len(left) - 1
                self._report(f"{len(left) - 1} requests have not ended: {left[:4]}", ())
                return
            await asyncio.sleep(WATCH_S)

    async def _start_canary(self) -> asyncio.subprocess.Process:
        paths = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))))
        module = "campaigns.hostile_requests.canary"
        canary = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, self._attacked.url, self._attacked.target.models[0]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            limit=2**26,
        )
        if canary.stdout is None:
            raise RuntimeError("the canary has no pipe")
        async with asyncio.timeout(LIMIT_S):
            if (await canary.stdout.readline()).decode().strip() != ALONE:
                raise RuntimeError("the canary has ended")
        return canary

    async def _end_canary(self, canary: asyncio.subprocess.Process) -> None:
        if canary.stdin is None or canary.stdout is None:
            return
        canary.stdin.close()
        seen: dict[str, Any] = json.loads(await canary.stdout.read())
        await canary.wait()
        for name in ("alone_ms", "beside_ms"):
            getattr(self.row, name).update({int(gap): count for gap, count in seen[name].items()})
        self.row.streams, self.row.tokens = seen["num_streams"], seen["num_tokens"]
        self.row.unequal, self.row.first_token_s = seen["num_unequal"], seen["first_s"]
        self.row.canary_errors = len(seen["errors"])
        for error in seen["errors"][:5]:
            self._report(f"the canary had {error}", ())
        longest, end = max(self.row.beside_ms, default=0), seen["longest_at"]
        if longest > MOST_GAP_MS:
            beside = self._flights.around(end - longest / 1000, end)
            self._report(f"the canary had a gap of {longest / 1000:.1f} s", beside)
        if self.row.unequal:
            self._report(f"{self.row.unequal} streams of the canary have other tokens", ())

    def _report(self, what: str, requests: Sequence[HostileRequest]) -> None:
        """Print what was found, and write it with its requests to a file."""
        self.findings.append(what)
        folder: Path = self._options.findings
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / f"{self._name.replace(' ', '-')}-{self._options.seed}-{int(time.time() * 1000)}.json"
        found = {
            "what": what,
            "configuration": self._name,
            "seed": self._options.seed,
            "requests": [each.as_json() for each in requests],
        }
        place.write_text(json.dumps(found))
        print(f"FOUND in {self._name}: {what[:SHOWN]}\n  replay: {place}", flush=True)
        for each in requests[:3]:
            text = json.dumps(each.body)
            print(f"  {each.number} {each.path} {text[:SHOWN]}{' ...' if len(text) > SHOWN else ''}", flush=True)


def _cpu_s_of(pid: int | None) -> float:
    total = 0.0
    for each in (pid, *descendants_of(pid)) if pid and pid != os.getpid() else (pid,):
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(each).cpu_times()
            total += times.user + times.system
    return total


def attacked(
    name: str, folder: Path, options: argparse.Namespace, requests: Sequence[HostileRequest] = ()
) -> tuple[Row, list[str]]:
    """Attack a configuration; return what was seen, and what was found."""
    names = options.configurations
    share, seconds = -(-options.requests // len(names)), options.minutes * 60.0 / len(names)
    last = options.first + (10**9 if seconds else share)
    with running(name, folder / name.replace(" ", "-"), folder / "lora") as deployment:
        attack = Attack(name, deployment, options)
        until = time.monotonic() + (seconds or float("inf"))
        part, parts = options.part
        asyncio.run(attack.run(iter(range(options.first + part - 1, last, parts)), requests, until))
    return attack.row, attack.findings


def run(options: argparse.Namespace, folder: Path) -> int:
    """Attack all configurations, and print the table. Returns 1 where something is wrong."""
    os.environ["PAGESTREAM_GATEWAY__ALLOW_RUNTIME_LORA"] = "true"
    replayed: list[HostileRequest] = []
    if options.replay:
        found = json.loads(options.replay.read_text())
        options.configurations, options.seed = [found["configuration"]], found["seed"]
        replayed = [HostileRequest(**each) for each in found["requests"]]
    if any(CONFIGURATIONS[name].adapters for name in options.configurations):
        make_adapters(folder / "lora")
    rows: dict[str, Row] = {}
    findings: list[str] = []
    for name in options.configurations:
        begun = time.monotonic()
        rows[name], some = attacked(name, folder, options, replayed)
        findings += some
        print(f"{name}: {rows[name].total} requests in {time.monotonic() - begun:.0f} s, {len(some)} found", flush=True)
        if options.results:
            part, parts = options.part
            run = f"seed {options.seed}, {options.requests} from {options.first}, part {part} of {parts}"
            append(options.results, name, run, rows[name])
    return shown(read(options.results) if options.results else rows, options.itl_ratio, findings)


def shown(rows: Mapping[str, Row], itl_ratio: float, findings: Sequence[str] = ()) -> int:
    """Print the table and what is wrong. Returns 1 where something is."""
    print("\n".join(table(rows)))
    for name, row in rows.items():
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(row.statuses.items()))
        cpu = ", ".join(f"{part} {1000 * seconds / max(1, row.total):.0f}" for part, seconds in row.cpu_s.items())
        print(f"{name}: {statuses}; the canary's longest wait for a first token: {row.first_token_s:.1f} s")
        print(f"{name}: {row.total / max(row.seconds, 1e-9):.1f} requests a second; ms of CPU for each: {cpu}")
    wrong = {name: row.wrong(itl_ratio) for name, row in rows.items()}
    for name, some in wrong.items():
        print("".join(f"WRONG in {name}: {each}\n" for each in some), end="")
    print(f"as it should be: {'NO' if any(wrong.values()) or findings else 'yes'} ({os.cpu_count()} cores)")
    return int(any(wrong.values()) or bool(findings))


def _names(text: str) -> list[str]:
    names = [each.strip() for each in text.split(",")]
    unknown = [each for each in names if each not in CONFIGURATIONS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(CONFIGURATIONS)}")
    return names


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text}: must be K/N, such as 3/40")
    return int(part), int(parts)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2000, help="of all configurations together")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on for so long instead")
    parser.add_argument("--first", type=int, default=0, help="number of each configuration's first request")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="every N-th request, from the K-th")
    parser.add_argument("--configurations", "--engine", type=_names, default=list(CONFIGURATIONS), metavar="NAME,NAME")
    parser.add_argument("--jobs", type=int, default=8, help="requests at once")
    parser.add_argument("--work", type=int, default=1024, help="most tokens that a request makes an engine compute")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds in which an answer must come")
    parser.add_argument("--itl-ratio", type=float, default=3.0, help="0 on a machine that does other work, too")
    parser.add_argument("--findings", type=Path, default=ROOT / "build" / "hostile", help="where they are written")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add this run to it, and show the sum of all")
    parser.add_argument("--table", action="store_true", help="only show the sum of --results")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="send a finding's requests, all at once")
    parser.add_argument("--verbose", action="store_true", help="print what came of each request")
    with tempfile.TemporaryDirectory() as folder:
        options = parser.parse_args()
        if options.table:
            return shown(read(options.results or Path(os.devnull)), options.itl_ratio)
        return run(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
