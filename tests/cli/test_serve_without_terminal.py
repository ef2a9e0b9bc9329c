"""`pagestream serve` whose terminal is closed: real processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from pagestream_cli import ServeRecord, read_record
from support.processes.waiting import LIMIT_S, is_running, wait_until

pytestmark = pytest.mark.served


@pytest.mark.slow
def test_a_part_that_dies_with_the_terminal_closed_is_restarted_alone(tmp_path: Path) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0", "--data-dir", str(tmp_path / "data"), "--dtype", "float32"]
    serve = [sys.executable, "-m", "pagestream_cli", "serve", *ports]
    command = ["nohup", *serve, "--greet", "Who lives in the lighthouse?"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None

    def record() -> ServeRecord | None:
        assert process.poll() is None, "serve has ended"
        return read_record(tmp_path / "data" / "serve.json")

    def pids() -> dict[str, int | None]:
        found = record()
        return {} if found is None else {part.name: part.pid for part in found.processes}

    def answers() -> bool:
        found = record()
        if found is None or not found.ready:
            return False
        body = {"model": "demo", "prompt": "One evening", "max_tokens": 4}
        return httpx.post(f"{found.http_urls()[0]}/v1/completions", json=body, timeout=LIMIT_S).status_code == 200

    try:
        assert b"starting 'demo'" in process.stdout.readline()
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        wait_until(answers, "serve is ready")
        before = pids()
        engine = before.pop("engine-0")
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: pids().get("engine-0") not in (engine, None), "the engine was started again")
        wait_until(answers, "it answers again")
        after = pids()
        assert after.pop("engine-0") != engine
        assert after == before
        process.terminate()
        assert process.wait(LIMIT_S) == 0
        assert not any(is_running(pid) for pid in before.values() if pid is not None)
        assert not (tmp_path / "data" / "serve.json").exists()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
