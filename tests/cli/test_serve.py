"""`pagestream serve` with the demo model: real processes, from the client to the tokens and back."""

import json
import os
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagestream_cli import ServeRecord, read_record
from redis import Redis
from support.clients.gateway_clients import issue_certificate
from support.processes.command import Done, run
from support.processes.waiting import LIMIT_S, is_running, wait_until

pytestmark = [pytest.mark.served, pytest.mark.timeout(400)]

PROMPT = "Tell me a story about the lighthouse."
LONG = {
    "model": "demo",
    "prompt": "One evening",
    "max_tokens": 300,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@dataclass
class Serve:
    """A serve that runs."""

    process: subprocess.Popen[str]
    data_dir: Path

    @property
    def said(self) -> Path:
        """What it has written."""
        return self.data_dir.with_suffix(".said")

    @property
    def record(self) -> ServeRecord:
        record = read_record(self.data_dir / "serve.json")
        if record is None:
            raise FileNotFoundError(self.data_dir / "serve.json")
        return record

    @property
    def url(self) -> str:
        return self.record.http_urls()[0]

    def pid(self, name: str) -> int | None:
        return next(process.pid for process in self.record.processes if process.name == name)

    def all_pids(self) -> list[int]:
        return [process.pid for process in self.record.processes if process.pid is not None]

    def kill(self, name: str) -> None:
        """kill -9 of one part; returns once serve has started it again."""
        before = self.pid(name)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: self.pid(name) not in (before, None), f"{name} was started again")

    def run(self, *arguments: str, stdin: str | None = None) -> Done:
        return run(*arguments, "--data-dir", str(self.data_dir), stdin=stdin)


def serve_arguments(data_dir: Path, *arguments: str) -> list[str]:
    ports = ["--http-port", "0", "--grpc-port", "0", "--data-dir", str(data_dir)]
    return ["serve", *ports, "--dtype", "float32", *arguments]


def start(data_dir: Path, *arguments: str, closes_its_output: bool = False) -> Serve:
    """Start a serve and wait until it is ready; what it writes is kept beside its folder, or read up to then alone."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pagestream_cli", *serve_arguments(data_dir, *arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # its group is a terminal's foreground group
    )
    serve = Serve(process, data_dir)
    serve.said.write_text("")
    threading.Thread(target=copy, args=(process, serve.said, closes_its_output), daemon=True).start()

    def is_ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"serve ended: {serve.said.read_text()}")
        record = read_record(data_dir / "serve.json")
        is_said = "ready: model" in serve.said.read_text()
        return is_said and record is not None and record.ready and record.processes[0].pid == process.pid

    try:
        wait_until(is_ready, "serve is ready")
    except BaseException:
        process.kill()
        process.wait()
        raise
    return serve


def copy(process: subprocess.Popen[str], path: Path, closes: bool) -> None:
    """Copy a process' output to a file; close the pipe after the line that says it is ready."""
    assert process.stdout is not None
    with process.stdout, path.open("a", buffering=1) as file:
        for line in process.stdout:
            file.write(line)
            if closes and line.startswith("ready: "):
                return


def end(serve: Serve, number: signal.Signals = signal.SIGINT) -> None:
    """End it by Ctrl-C, as a terminal sends it, or by a signal; nothing may be left."""
    pids = serve.all_pids()
    os.killpg(serve.process.pid, number)
    assert serve.process.wait(LIMIT_S) == 0
    assert not any(is_running(pid) for pid in pids)
    assert not (serve.data_dir / "serve.json").exists()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One whose terminal has gone: whatever it says from then on is lost, and ends nothing."""
    running = start(tmp_path_factory.mktemp("serve") / "data", closes_its_output=True)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(LIMIT_S)


def events(response: httpx.Response) -> Iterator[str]:
    """Data of each event."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def text_of(data: str) -> str:
    choices: list[dict[str, Any]] = json.loads(data).get("choices", [])
    return "".join(choice["text"] for choice in choices)


def test_serve_json_lists_every_process(serve: Serve) -> None:
    record = serve.record
    assert [process.name for process in record.processes] == ["serve", "redis", "engine-0", "gateway-0"]
    assert record.processes[0].pid == serve.process.pid
    assert all(is_running(pid) for pid in serve.all_pids())
    assert set(record.processes[3].ports) == {"http", "grpc"}
    assert record.redis_url == f"unix://{serve.data_dir}/redis/redis.sock?db=0"
    assert httpx.get(f"{serve.url}/readyz").status_code == 200


def test_chat_streams_an_answer(serve: Serve) -> None:
    chat = serve.run("chat", "--temperature", "0", stdin=PROMPT)
    assert chat.returncode == 0, chat.stderr
    assert "lighthouse" in chat.stdout.lower()


@pytest.mark.slow
def test_kill_9_of_the_gateway_is_bridged_by_generate(serve: Serve) -> None:
    """As `generate` bridges any end of a connection, and as `pagestream demo` shows: see their tests."""
    arguments = ("generate", "One evening", "--temperature", "0", "--max-tokens", "150")
    undisturbed = serve.run(*arguments)
    assert undisturbed.returncode == 0, undisturbed.stderr
    command = [sys.executable, "-m", "pagestream_cli", *arguments, "--data-dir", str(serve.data_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as reading:
        assert reading.stdout is not None
        first = reading.stdout.read(1)
        serve.kill("gateway-0")
        rest, said = reading.communicate(timeout=LIMIT_S)
        assert reading.returncode == 0, said
    assert (first + rest).decode() == undisturbed.stdout


@pytest.mark.slow
def test_a_killed_engine_is_started_alone(serve: Serve) -> None:
    before = {process.name: process.pid for process in serve.record.processes}
    serve.kill("engine-0")
    after = {process.name: process.pid for process in serve.record.processes}
    assert [name for name in before if before[name] != after[name]] == ["engine-0"]
    answer = httpx.post(f"{serve.url}/v1/completions", json={**LONG, "stream": False, "max_tokens": 4}, timeout=LIMIT_S)
    assert answer.status_code == 200


def test_bench_replays_a_trace_and_usage_shows_it(serve: Serve, tmp_path: Path) -> None:
    trace = ["--trace", "sample", "--num-requests", "6", "--scale-to-context", "--time-scale", "40"]
    done = serve.run("bench", *trace, "--grpc", "--output", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out.json").read_text())["summary"]
    assert (summary["succeeded"], summary["errors"]) == (6, {})
    shown = serve.run("usage", "--by", "model").stdout.splitlines()
    assert "model" in shown[0]
    [row] = [line.split() for line in shown if line.startswith("demo ")]
    assert int(row[1].replace(",", "")) >= 6
    refused = serve.run("usage", "--since", "1w")
    assert refused.returncode == 2
    assert "--since" in refused.stderr


def test_doctor_sees_the_running_serve(serve: Serve) -> None:
    findings = json.loads(serve.run("doctor", "--json", "--http-port", "1").stdout)
    found = {finding["subject"]: finding["found"] for finding in findings}
    assert any("running: model 'demo'" in each for each in found.values())
    assert {"python", "torch", "triton", "redis", "model", "disk", "data folder", "c++ compiler"} <= set(found)


def test_a_second_serve_in_the_same_folder_is_refused(serve: Serve) -> None:
    done = run(*serve_arguments(serve.data_dir))
    assert done.returncode == 1
    assert f"process {serve.process.pid}" in done.stderr
    assert "--data-dir" in done.stderr


def test_ctrl_c_leaves_nothing(serve: Serve) -> None:
    """SIGTERM does the same in the slow test below, and to `pagestream demo`."""
    end(serve)


@pytest.mark.slow
def test_kill_9_of_serve_leaves_nothing_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """Over TLS, and on a file of Redis that was torn in a transaction: the start after the next would run its half."""
    data = tmp_path / "data"
    certificate, key = issue_certificate(tmp_path, 1)
    files = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    first = start(data, *files)
    pids = first.all_pids()
    assert len(pids) == 4
    assert first.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=certificate)
    body = {**LONG, "on_disconnect": "continue"}
    with httpx.stream("POST", f"{first.url}/v1/completions", json=body, timeout=LIMIT_S, verify=trusted) as response:
        request_id = response.headers["x-request-id"]
        next(events(response))
        first.process.kill()
    first.process.wait(LIMIT_S)
    wait_until(lambda: not any(is_running(pid) for pid in pids), "no part is left")
    [file] = [*(data / "redis").rglob("*.incr.aof"), *(data / "redis").glob("appendonly.aof")][:1]
    with file.open("ab") as torn:
        torn.write(b"*1\r\n$5\r\nMULTI\r\n*3\r\n$3\r\nSET\r\n$4\r\nhalf\r\n$1\r\n1\r\n*3\r\n$3\r\nSE")
    second = start(data, *files)
    try:
        address = f"{second.url}/v1/requests/{request_id}/events"
        with httpx.stream("GET", address, timeout=LIMIT_S, verify=trusted) as response:
            assert response.status_code == 200
            data_lines = list(events(response))
        assert data_lines[-1] == "[DONE]"
        assert len("".join(text_of(item) for item in data_lines[:-1])) > 300
        with Redis.from_url(second.record.redis_url) as redis:
            assert redis.get("half") is None
            wait_until(lambda: "cmdstat_bgrewriteaof" in redis.info("commandstats"), "the file is written anew")
        assert second.run("generate", "--max-tokens", "4", PROMPT).returncode == 0
        said = second.said.read_text()
        phases = [line.split() for line in said.splitlines() if line.startswith("  ")]
        assert {phase[2] for phase in phases} == {"redis", "engine-0", "gateway-0"}
        times = [float(phase[0]) for phase in phases]
        assert times == sorted(times)
    finally:
        end(second, signal.SIGTERM)


def test_a_wrong_engine_option_ends_serve_before_anything_starts(tmp_path: Path) -> None:
    """What only the engine sees, as it loads the model, is in tests/engine/test_refusals.py."""
    done = run(*serve_arguments(tmp_path / "data", "--max-model-len", "many"))
    assert done.returncode == 2
    assert done.stderr.count("--max-model-len") == 1
