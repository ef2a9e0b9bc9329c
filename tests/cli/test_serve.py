"""`pagestream serve` with the demo model: real processes, from the client to the tokens and back."""

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagestream_cli.servefile import ServeRecord, read_record
from redis import Redis
from support.clients.gateway_clients import issue_certificate
from support.clients.many_streams import open_at_once
from support.processes.waiting import is_running, wait_until

START_LIMIT_S = 90.0
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

    def run(self, *arguments: str, stdin: str | None = None, limit_s: float = 90.0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pagestream_cli", *arguments, "--data-dir", str(self.data_dir)]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=limit_s, check=False)


def serve_command(data_dir: Path, *arguments: str) -> list[str]:
    ports = ["--http-port", "0", "--grpc-port", "0", "--data-dir", str(data_dir)]
    return [sys.executable, "-m", "pagestream_cli", "serve", *ports, "--dtype", "float32", *arguments]


def start(data_dir: Path, *arguments: str) -> Serve:
    with (data_dir.parent / f"{data_dir.name}.err").open("w") as said:
        process = subprocess.Popen(
            serve_command(data_dir, *arguments),
            stdout=subprocess.DEVNULL,
            stderr=said,
            text=True,
            start_new_session=True,  # its group is a terminal's foreground group
        )
    serve = Serve(process, data_dir)

    def is_ready() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"serve ended: {(data_dir.parent / f'{data_dir.name}.err').read_text()}")
        record = read_record(data_dir / "serve.json")
        return record is not None and record.ready and record.processes[0].pid == process.pid

    try:
        wait_until(is_ready, "serve is ready", START_LIMIT_S)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return serve


def end(serve: Serve) -> None:
    """Ctrl-C, as a terminal sends it; nothing may be left."""
    pids = serve.all_pids()
    os.killpg(serve.process.pid, signal.SIGINT)
    assert serve.process.wait(40) == 0
    assert not any(is_running(pid) for pid in pids)
    assert not (serve.data_dir / "serve.json").exists()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    running = start(tmp_path_factory.mktemp("serve") / "data")
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(60)


def events(response: httpx.Response) -> Iterator[str]:
    """Data of each event."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def text_of(data: str) -> str:
    choices: list[dict[str, Any]] = json.loads(data).get("choices", [])
    return "".join(choice["text"] for choice in choices)


def complete(serve: Serve, interrupt: str | None = None) -> tuple[str, list[int]]:
    """A long greedy completion; after the tenth event a part is killed. Returns its text and the events' indices."""
    pieces: list[str] = []
    indices: list[int] = []
    timeout = httpx.Timeout(60.0)
    with httpx.stream("POST", f"{serve.url}/v1/completions", json=LONG, timeout=timeout) as response:
        assert response.status_code == 200, response.read()
        for data in events(response):
            if data == "[DONE]":
                return "".join(pieces), indices
            pieces.append(text_of(data))
            indices.append(int(json.loads(data)["stream_position"].split("/")[1]))
            if interrupt is not None and len(pieces) == 10:
                serve.kill(interrupt)
    raise AssertionError("the stream ended without [DONE]")


def test_serve_json_lists_every_process(serve: Serve) -> None:
    record = serve.record
    assert [process.name for process in record.processes] == ["serve", "redis", "engine-0", "gateway-0"]
    assert record.processes[0].pid == serve.process.pid
    assert all(is_running(pid) for pid in serve.all_pids())
    assert set(record.processes[3].ports) == {"http", "grpc"}
    assert record.redis_url == f"unix://{serve.data_dir}/redis/redis.sock?db=0"
    assert httpx.get(f"{serve.url}/readyz").status_code == 200


def test_generate_and_chat_stream_an_answer(serve: Serve) -> None:
    chat = serve.run("chat", "--temperature", "0", stdin=PROMPT)
    assert chat.returncode == 0, chat.stderr
    assert "lighthouse" in chat.stdout.lower()
    again = serve.run("generate", "One evening", "--temperature", "0", "--max-tokens", "20")
    assert again.returncode == 0, again.stderr
    assert len(again.stdout.split()) > 5


def test_kill_9_of_redis_in_the_middle_changes_nothing(serve: Serve) -> None:
    undisturbed, _ = complete(serve)
    text, _ = complete(serve, interrupt="redis")
    assert text == undisturbed


def test_kill_9_of_the_gateway_is_bridged_by_generate(serve: Serve) -> None:
    arguments = ("generate", "One evening", "--temperature", "0", "--max-tokens", "300")
    undisturbed = serve.run(*arguments)
    assert undisturbed.returncode == 0, undisturbed.stderr
    command = [sys.executable, "-m", "pagestream_cli", *arguments, "--data-dir", str(serve.data_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as reading:
        assert reading.stdout is not None
        first = reading.stdout.read(1)
        serve.kill("gateway-0")
        rest, said = reading.communicate(timeout=90)
        assert reading.returncode == 0, said
    assert (first + rest).decode() == undisturbed.stdout


def test_bench_replays_a_trace_without_an_error(serve: Serve, tmp_path: Path) -> None:
    trace = ["--trace", "sample", "--num-requests", "60", "--scale-to-context", "--time-scale", "20"]
    done = serve.run(
        "bench", *trace, "--grpc", "--output", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out.json").read_text())["summary"]
    assert (summary["succeeded"], summary["errors"]) == (60, {})
    assert summary["output_tokens"] > 60


def test_200_chats_at_once_end_without_an_error(serve: Serve) -> None:
    """More than the engine has seats for, all in one moment; 1,000 are `tests/benchmarks/thousand_streams.py`."""
    records = asyncio.run(open_at_once(serve.url, "demo", 200, 8, limit_s=120.0))
    assert {record.error for record in records} == {""}
    assert all(record.ttft_s is not None for record in records)


def test_doctor_sees_the_running_serve(serve: Serve) -> None:
    found = json.loads(serve.run("doctor", "--json", "--http-port", "1").stdout)
    assert any("running: model 'demo'" in finding["found"] for finding in found)


def test_a_second_serve_in_the_same_folder_is_refused(serve: Serve) -> None:
    done = subprocess.run(serve_command(serve.data_dir), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"process {serve.process.pid}" in done.stderr
    assert "--data-dir" in done.stderr


def test_ctrl_c_leaves_nothing(serve: Serve) -> None:
    end(serve)


def test_kill_9_of_serve_leaves_nothing_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """Over TLS, and on a file of Redis that was torn in a transaction: the start after the next would run its half."""
    data = tmp_path / "data"
    certificate, key = issue_certificate(tmp_path, 1)
    files = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    first = start(data, "--gateways", "2", *files)
    pids = first.all_pids()
    assert len(pids) == 5
    assert first.url.startswith("https://")
    assert first.run("generate", "--max-tokens", "4", PROMPT).returncode == 0
    trusted = ssl.create_default_context(cafile=certificate)
    body = {**LONG, "on_disconnect": "continue"}
    with httpx.stream("POST", f"{first.url}/v1/completions", json=body, timeout=60.0, verify=trusted) as response:
        request_id = response.headers["x-request-id"]
        next(events(response))
        first.process.kill()
    first.process.wait(10)
    wait_until(lambda: not any(is_running(pid) for pid in pids), "no part is left")
    [file] = [*(data / "redis").rglob("*.incr.aof"), *(data / "redis").glob("appendonly.aof")][:1]
    with file.open("ab") as torn:
        torn.write(b"*1\r\n$5\r\nMULTI\r\n*3\r\n$3\r\nSET\r\n$4\r\nhalf\r\n$1\r\n1\r\n*3\r\n$3\r\nSE")
    second = start(data, *files)
    try:
        address = f"{second.url}/v1/requests/{request_id}/events"
        with httpx.stream("GET", address, timeout=60.0, verify=trusted) as response:
            assert response.status_code == 200
            data_lines = list(events(response))
        assert data_lines[-1] == "[DONE]"
        assert len("".join(text_of(item) for item in data_lines[:-1])) > 300
        with Redis.from_url(second.record.redis_url) as redis:
            assert redis.get("half") is None
            wait_until(lambda: "cmdstat_bgrewriteaof" in redis.info("commandstats"), "the file is written anew")
        said = (tmp_path / "data.err").read_text()
        phases = [line.split() for line in said.splitlines() if line.startswith("  ")]
        assert {phase[2] for phase in phases} == {"redis", "engine-0", "gateway-0"}
        times = [float(phase[0]) for phase in phases]
        assert times == sorted(times)
    finally:
        end(second)


def test_a_wrong_engine_option_ends_serve_before_anything_starts(tmp_path: Path) -> None:
    """What only the engine sees, as it loads the model, is in tests/integration/engine/test_refusals.py."""
    command = serve_command(tmp_path / "data", "--max-model-len", "many")
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_LIMIT_S, check=False)
    assert done.returncode == 2
    assert done.stderr.count("--max-model-len") == 1
