"""A prompt that kills every engine that computes it, under `pagestream serve`: it is quarantined, others are served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pagestream_cli.servefile import ServeRecord, read_record
from support.processes.waiting import is_running, wait_until

pytestmark = pytest.mark.timeout(300)

POISON = 300
LIMIT_S = 150.0
POISONED = Path(__file__).resolve().parents[1] / "support" / "engines" / "poisoned"
GOOD = {"model": "demo", "prompt": "One evening", "max_tokens": 60, "temperature": 0, "ignore_eos": True}


class Neighbour(threading.Thread):
    """Repeats one request until `is_enough` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(name="neighbour")
        self.texts: list[str] = []
        self.is_enough = threading.Event()
        self.error: Exception | None = None
        self._url = url

    def run(self) -> None:
        try:
            while not self.is_enough.is_set():
                self.texts.append(completed(self._url, GOOD)["choices"][0]["text"])
        except Exception as error:  # noqa: BLE001 - checked by the test's own thread
            self.error = error


def completed(url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def record(data: Path) -> Iterator[ServeRecord]:
    command = [sys.executable, "-m", "pagestream_cli", "serve", "--http-port", "0", "--grpc-port", "0"]
    command += ["--data-dir", str(data), "--dtype", "float32", "--engines", "2"]
    environment = {**os.environ, "PYTHONPATH": str(POISONED), "POISON_TOKEN": str(POISON)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def is_ready() -> bool:
        assert process.poll() is None, "serve has ended"
        record = read_record(data / "serve.json")
        return record is not None and record.ready

    try:
        wait_until(is_ready, "serve is ready", LIMIT_S)
        record = read_record(data / "serve.json")
        assert record is not None
        yield record
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def dead(record: ServeRecord, *arguments: str) -> str:
    command = [sys.executable, "-m", "pagestream_cli", "dead", *arguments, "--redis", record.redis_url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_poison_is_quarantined_while_others_are_served(record: ServeRecord, data: Path) -> None:
    url = record.http_urls()[0]
    expected = completed(url, GOOD)["choices"][0]["text"]
    neighbour = Neighbour(url)
    neighbour.start()
    try:
        body = {"model": "demo", "prompt": [POISON, 20, 21], "max_tokens": 8}
        refused = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
        served = len(neighbour.texts)
    finally:
        neighbour.is_enough.set()
        neighbour.join(LIMIT_S)
    assert refused.status_code == 500
    error = refused.json()["error"]
    assert error["code"] == "quarantined"
    assert neighbour.error is None
    assert served > 1, "no other request finished while the poison was quarantined"
    assert set(neighbour.texts) == {expected}

    request_id = refused.headers["x-request-id"]
    assert dead(record, "list").startswith(request_id)
    shown = json.loads(dead(record, "show", "--json", request_id))
    assert shown["spec"]["prompts"][0]["ids"][0] == POISON
    wait_until(lambda: _engines_run(data), "both engines are back", LIMIT_S)
    assert completed(url, GOOD)["choices"][0]["text"] == expected


def _engines_run(data: Path) -> bool:
    now = read_record(data / "serve.json")
    assert now is not None
    pids = [process.pid for process in now.processes if process.name.startswith("engine")]
    return len(pids) == 2 and all(pid is not None and is_running(pid) for pid in pids)
