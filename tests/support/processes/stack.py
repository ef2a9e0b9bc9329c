"""A whole Pagestream on this machine for tests: a real Redis, engines and gateways, each its own process.

Tests kill, stop and restart the parts themselves; there is no supervisor.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pagestream_streams import find_server, server_command
from redis import Redis
from support.processes.fork_server import ENGINES, GATEWAYS, ForkedPart, shared_server
from support.processes.part import Part, StackError
from support.processes.waiting import wait_until
from support.redis.topologies import quiet_port

ROOT = Path(__file__).resolve().parents[3]
DEMO_MODEL = ROOT / "deploy" / "demo-model" / "model"
MODEL = "demo"


def free_port() -> int:
    """Return a TCP port of the loopback interface without a listener, outside the range of outgoing connections."""
    return quiet_port()


@dataclass
class Gateway(Part):
    """A gateway process with its addresses."""

    http_port: int = 0
    grpc_port: int = 0

    @property
    def url(self) -> str:
        """Base URL of the HTTP API."""
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def grpc_target(self) -> str:
        """Address of the gRPC API."""
        return f"127.0.0.1:{self.grpc_port}"

    def is_ready(self) -> bool:
        """Whether /readyz succeeds."""
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def has_become_ready(self) -> bool:
        """Whether /readyz succeeds. StackError if the process has ended."""
        if not self.is_alive():
            raise StackError(f"{self.name} has ended")
        return self.is_ready()


@dataclass
class ForkedGateway(Gateway, ForkedPart):
    """A gateway process that a fork server starts."""


class Stack:
    """Redis, engines and gateways.

    Args:
        folder: for Redis' files and all logs.
        model: of all engines.
        engine_options: of all engines.
        engine_threads: that each computes with.
        engine_module: whose `main` an engine runs.
        is_forked: whether engines and gateways are forked from processes that have imported what they need.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: Path = DEMO_MODEL,
        engine_options: Sequence[str] = ("--dtype", "float32"),
        engine_threads: int = 1,
        engine_module: str = "pagestream_worker.__main__",
        is_forked: bool = False,
    ) -> None:
        self.folder = folder
        self._model = model
        self._engine_options = engine_options
        self._engine_module = engine_module
        self._is_forked = is_forked
        self._engine_environment = {"OMP_NUM_THREADS": str(engine_threads)}
        redis_port = free_port()
        data = folder / "redis"
        data.mkdir(parents=True)
        self.redis_url = f"redis://127.0.0.1:{redis_port}/0"
        self.redis = Part("redis", server_command(find_server(), data, redis_port), folder / "redis.log")
        self.engines: list[Part] = []
        self.gateways: list[Gateway] = []

    def add_engine(self, *options: str, environment: Mapping[str, str] | None = None) -> Part:
        """Start one more engine; with variables of its own as users do, without a fork server."""
        name = f"engine-{len(self.engines)}"
        command = [self._engine_module, str(self._model), "--redis", self.redis_url]
        command += ["--served-model-name", MODEL, "--engine-id", name, *self._engine_options, *options]
        log, variables = self.folder / f"{name}.log", {**self._engine_environment, **(environment or {})}
        if self._is_forked and environment is None:
            part: Part = ForkedPart(name, command, log, variables, server=shared_server(*ENGINES))
        else:
            part = Part(name, [sys.executable, "-m", *command], log, variables)
        part.start()
        self.engines.append(part)
        return part

    def add_gateway(self, *options: str, environment: Mapping[str, str] | None = None) -> Gateway:
        """Start one more gateway; with variables of its own as users do, without a fork server."""
        name = f"gateway-{len(self.gateways)}"
        http_port, grpc_port = free_port(), free_port()
        command = ["pagestream_gateway.__main__", "--redis", self.redis_url, "--gateway-id", name]
        command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port), *options]
        log, ports = self.folder / f"{name}.log", {"http_port": http_port, "grpc_port": grpc_port}
        if self._is_forked and environment is None:
            part: Gateway = ForkedGateway(name, command, log, server=shared_server(*GATEWAYS), **ports)
        else:
            part = Gateway(name, [sys.executable, "-m", *command], log, dict(environment or {}), **ports)
        part.start()
        self.gateways.append(part)
        return part

    @property
    def parts(self) -> list[Part]:
        """All processes, clients' side first."""
        return [*self.gateways, *self.engines, self.redis]

    def log_lengths(self) -> dict[str, dict[str, int]]:
        """Return the log's length of each unfinished request, by the engine that owns it in Redis.

        What clients have received says little about engines: gateways and clients may be a whole request behind.
        """
        lengths: dict[str, dict[str, int]] = {engine.name: {} for engine in self.engines}
        with Redis.from_url(self.redis_url, decode_responses=True) as client:
            for key in client.scan_iter("ps:{*}:owned:*", count=1000):
                prefix, _, owner = str(key).partition("owned:")
                owned = lengths.setdefault(owner.partition(":")[0], {})
                for request_id in client.smembers(key):
                    owned[request_id] = int(client.hget(f"{prefix}req:{request_id}", "next") or 0)
        return lengths

    def busiest_engine(self) -> Part:
        """Return the engine that owns most unfinished requests now. StackError where none owns any."""
        counts = {name: len(owned) for name, owned in self.log_lengths().items()}
        name = max(counts, key=lambda each: counts[each])
        if not counts[name]:
            raise StackError("no engine owns a request")
        return next(engine for engine in self.engines if engine.name == name)

    def wait_ready(self) -> None:
        """Wait until every gateway and every engine is ready."""
        for gateway in self.gateways:
            wait_until(gateway.has_become_ready, what=gateway.name)
        for engine in self.engines:
            wait_until(engine.has_said_ready, what=engine.name)

    def stop(self) -> None:
        """Stop all parts."""
        for part in self.parts:
            part.stop()


@contextmanager
def running_stack(folder: Path, *, engines: int = 1, gateways: int = 1, **options: Any) -> Iterator[Stack]:
    """Run a stack with these options for the length of a block; on an error its notes have the ends of all logs."""
    stack = Stack(folder, **options)
    try:
        stack.redis.start()
        for _ in range(engines):
            stack.add_engine()
        for _ in range(gateways):
            stack.add_gateway()
        stack.wait_ready()
        yield stack
    except Exception as error:
        for part in stack.parts:
            error.add_note(f"--- {part.name}\n{part.log_tail()}")
        raise
    finally:
        stack.stop()
