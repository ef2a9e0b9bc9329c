"""Engine and gateway as pods start them: one argument, everything else from the environment, probes over HTTP."""

import hashlib
import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from pagestream_streams import find_server, server_command
from support.processes.fork_server import ENGINES, GATEWAYS, ForkedPart, run_forked, shared_server
from support.processes.part import Part
from support.processes.stack import DEMO_MODEL, free_port
from support.processes.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.served

KEY = "a-key-of-the-test"
DEMO_WEIGHTS = sum(file.stat().st_size for file in DEMO_MODEL.glob("*.safetensors"))


class Pods:
    """The three processes of a small deployment."""

    def __init__(self, folder: Path) -> None:
        redis_port, self.engine_port, self.gateway_port = free_port(), free_port(), free_port()
        self.http_port = free_port()
        self.profiles = folder / "profiles"
        data = folder / "redis"
        data.mkdir()
        keys = folder / "keys"
        keys.write_text(f"{hashlib.sha256(KEY.encode()).hexdigest()} tenant\n")
        redis_url = f"redis://127.0.0.1:{redis_port}/0"
        self.redis = Part("redis", server_command(find_server(), data, redis_port), folder / "redis.log")
        self.engine = ForkedPart(
            "engine",
            [ENGINES[0], str(DEMO_MODEL)],
            folder / "engine.log",
            {
                "PAGESTREAM_WORKER__REDIS": redis_url,
                "PAGESTREAM_WORKER__SERVED_MODEL_NAME": "demo",
                "PAGESTREAM_WORKER__METRICS_PORT": str(self.engine_port),
                "PAGESTREAM_WORKER__ENGINE_ID": "demo-engine-abc",
                "PAGESTREAM_WORKER__PROFILE_DIR": str(self.profiles),
                "PAGESTREAM_WORKER__PROFILE_STEPS": "5",
                "PAGESTREAM_ENGINE__MAX_NUM_SEQS": "4",
                "PAGESTREAM_ENGINE__DTYPE": "float32",
                "PAGESTREAM_BROKER__RETENTION_S": "60",
                "OMP_NUM_THREADS": "1",
            },
            server=shared_server(*ENGINES),
        )
        self.gateway = ForkedPart(
            "gateway",
            [GATEWAYS[0]],
            folder / "gateway.log",
            {
                "PAGESTREAM_GATEWAY__REDIS": redis_url,
                "PAGESTREAM_GATEWAY__HOST": "127.0.0.1",
                "PAGESTREAM_GATEWAY__HTTP_PORT": str(self.http_port),
                "PAGESTREAM_GATEWAY__GRPC_PORT": "0",
                "PAGESTREAM_GATEWAY__METRICS_PORT": str(self.gateway_port),
                "PAGESTREAM_GATEWAY__API_KEYS": str(keys),
                "PAGESTREAM_BROKER__RETENTION_S": "60",
            },
            server=shared_server(*GATEWAYS),
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.gateway, self.engine, self.redis


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    made = Pods(tmp_path)
    try:
        yield made
    finally:
        for part in made.parts:
            part.stop()


def status(port: int, page: str) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/{page}", timeout=LIMIT_S).status_code
    except httpx.TransportError:
        return 0


def complete(pods: Pods, key: str = KEY, max_tokens: int = 4) -> httpx.Response:
    body = {"model": "demo", "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"http://127.0.0.1:{pods.http_port}/v1/completions", json=body, headers=headers, timeout=LIMIT_S)


def scraped(pods: Pods) -> list[str]:
    return httpx.get(f"http://127.0.0.1:{pods.engine_port}/metrics", timeout=LIMIT_S).text.splitlines()


def signalled(pods: Pods, earlier: Path) -> bool:
    """Asks by a signal, as often as it takes: the profile before may still be written."""
    pods.engine.signal(signal.SIGUSR2)
    complete(pods, max_tokens=10)
    return bool(set(pods.profiles.glob("*.json")) - {earlier})


def test_pods_serve_and_answer_probes(pods: Pods) -> None:
    pods.engine.start()
    wait_until(lambda: status(pods.engine_port, "healthz") == 200, what="liveness")
    assert status(pods.engine_port, "readyz") == 503  # there is no Redis yet
    pods.redis.start()
    pods.gateway.start()
    wait_until(lambda: status(pods.engine_port, "readyz") == 200, what="the engine")
    wait_until(lambda: status(pods.gateway_port, "readyz") == 200, what="the gateway")
    assert {status(port, "healthz") for port in (pods.engine_port, pods.gateway_port)} == {200}
    assert {status(port, "metrics") for port in (pods.engine_port, pods.gateway_port)} == {200}

    assert complete(pods, key="").status_code == 401
    assert complete(pods).json()["usage"]["completion_tokens"] == 4
    memory = next(
        line for line in scraped(pods) if line.startswith("pagestream_memory_usage_bytes{") and "model" in line
    )
    assert float(memory.rpartition(" ")[2]) > DEMO_WEIGHTS / 2, "of a float32 copy of bfloat16 weights"

    # A profile by a call, one by a signal.
    url = f"http://127.0.0.1:{pods.engine_port}/debug/profile?steps=3"
    begun = httpx.post(url, timeout=LIMIT_S)
    assert begun.status_code == 202
    complete(pods)
    called = Path(begun.text.strip())
    wait_until(called.exists, what="the profile that was called for")
    assert json.loads(called.read_text())["traceEvents"]
    wait_until(lambda: signalled(pods, called), what="the profile by a signal")

    pods.engine.signal(signal.SIGTERM)
    assert pods.engine.wait() == 0


@pytest.mark.parametrize("modules", [ENGINES, GATEWAYS], ids=["engine", "gateway"])
@pytest.mark.parametrize("variable", ["PAGESTREAM_WORKR__REDIS", "PAGESTREAM_TELEMETRY__INTERVAL"])
def test_an_unknown_variable_ends_the_process_with_its_name(
    modules: Sequence[str], variable: str, tmp_path: Path
) -> None:
    status, said = run_forked(shared_server(*modules), tmp_path, modules[0], **{variable: "1"})
    assert status != 0
    assert f"{variable}: unknown" in said
    assert "Traceback" not in said
