"""A prompt that kills every engine that computes it, under `pagestream serve`: it is quarantined, others are served."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.faults.served import Served, running_serve
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
def served(tmp_path: Path) -> Iterator[Served]:
    environment = {"PYTHONPATH": str(POISONED), "POISON_TOKEN": str(POISON)}
    with running_serve(tmp_path, "--engines", "2", environment=environment) as served:
        yield served


def dead(served: Served, *arguments: str) -> str:
    command = [sys.executable, "-m", "pagestream_cli", "dead", *arguments, "--redis", served.record.redis_url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_poison_is_quarantined_while_others_are_served(served: Served) -> None:
    url = served.record.http_urls()[0]
    expected = completed(url, GOOD)["choices"][0]["text"]
    neighbour = Neighbour(url)
    neighbour.start()
    try:
        body = {"model": "demo", "prompt": [POISON, 20, 21], "max_tokens": 8}
        refused = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S)
        num_answers = len(neighbour.texts)
    finally:
        neighbour.is_enough.set()
        neighbour.join(LIMIT_S)
    assert refused.status_code == 500
    error = refused.json()["error"]
    assert error["code"] == "quarantined"
    assert neighbour.error is None
    assert num_answers > 1, "no other request finished while the poison was quarantined"
    assert set(neighbour.texts) == {expected}

    request_id = refused.headers["x-request-id"]
    assert dead(served, "list").startswith(request_id)
    shown = json.loads(dead(served, "show", "--json", request_id))
    assert shown["spec"]["prompts"][0]["ids"][0] == POISON
    wait_until(lambda: _engines_run(served), "both engines are back", LIMIT_S)
    assert completed(url, GOOD)["choices"][0]["text"] == expected


def _engines_run(served: Served) -> bool:
    pids = [process.pid for process in served.record.processes if process.name.startswith("engine")]
    return len(pids) == 2 and all(pid is not None and is_running(pid) for pid in pids)
