"""`pagestream serve --warm-spares 1`: a spare takes nothing, and continues the streams of an engine that dies."""

import os
import signal
import threading
from pathlib import Path

import httpx
import pytest
from redis import Redis
from support.processes.served import Served, running_serve
from support.processes.waiting import LIMIT_S, is_running, wait_until

pytestmark = [pytest.mark.served, pytest.mark.timeout(600)]

BODY = {"model": "demo", "prompt": "One evening", "max_tokens": 600, "temperature": 0, "ignore_eos": True}


def spares(served: Served) -> dict[str, int | None]:
    return {part.name: part.pid for part in served.record.processes if part.is_spare}


def stands_by(served: Served, name: str) -> bool:
    lines = Path(served.process(name).log).read_text().splitlines()
    return bool(lines) and "standing by" in lines[-1]


def registered(served: Served) -> list[str]:
    """The names of the engines that hold a lease."""
    with Redis.from_url(served.record.redis_url, decode_responses=True) as redis:
        return [str(key).split(":")[2].rpartition("-")[0] for key in redis.scan_iter("ps:engine:*")]


def generate(served: Served) -> str:
    answer = httpx.post(f"{served.record.http_urls()[0]}/v1/completions", json=BODY, timeout=LIMIT_S)
    assert answer.status_code == 200
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.slow
def test_a_spare_continues_the_streams_of_an_engine_that_is_killed(tmp_path: Path) -> None:
    with running_serve(tmp_path, "--warm-spares", "1") as served:
        assert list(spares(served)) == ["engine-1"]
        wait_until(lambda: stands_by(served, "engine-1"), "the spare stands by")
        expected = generate(served)
        assert registered(served) == ["engine-0"], "a spare has joined"
        spare, engine = served.process("engine-1").pid, served.process("engine-0").pid
        assert engine is not None
        said: list[str] = []
        asking = threading.Thread(target=lambda: said.append(generate(served)))
        asking.start()
        os.kill(engine, signal.SIGKILL)
        asking.join()
        assert said == [expected]
        assert served.process("engine-1").pid == spare, "another process than the spare took over"
        wait_until(lambda: list(spares(served)) == ["engine-0"], "the dead engine is the spare now")
        wait_until(lambda: stands_by(served, "engine-0"), "it stands by")
        wait_until(lambda: registered(served) == ["engine-1"], "the dead engine's lease has lapsed")
        pids = [pid for part in served.record.processes if (pid := part.pid) is not None]
    assert not any(is_running(pid) for pid in pids)
