"""The parts of a deployment: their command lines, environments and ports, and what is known of its engines.

All of it is checked before any part is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import ssl
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from pagestream_telemetry.addresses import is_loopback
from pagestream_telemetry.environment import variable_of

from pagestream_cli.datadir import DataDir, dial_host, read_record
from pagestream_cli.errors import ServeFileInvalidError, UsageError
from pagestream_cli.ports import free_port, require_free
from pagestream_cli.serve.model import REPOSITORY, ModelChoice, model_problem
from pagestream_cli.serve.options import ServeOptions
from pagestream_cli.serve.redis import own_redis
from pagestream_cli.supervisor import PartSpec, RestartPolicy, Standby

REDIS = "redis"
REDIS_DELAY_S = 1.5
"""Longest wait for the restart of a Redis that has run before: all streams are silent meanwhile."""
THREADS_VARIABLE = "OMP_NUM_THREADS"
SHARED_WEIGHTS_VARIABLE = variable_of("ENGINE", "shared_weights_gb")
SHARED_WEIGHTS_GB = "32"
"""Of several engines of a model that is not small; an option of theirs comes before the variable."""
DEVICE_VARIABLE = variable_of("ENGINE", "device")
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""Of the drivers of NVIDIA and AMD; serve imports no torch."""
START_VARIABLE = variable_of("GATEWAY", "start_file")
DEFAULT_MODEL_VARIABLE = variable_of("GATEWAY", "default_model")
ALIASES_VARIABLE = variable_of("GATEWAY", "model_aliases")
LOG_LEVEL_VARIABLE = variable_of("TELEMETRY", "log_level")
_TOO_HIGH = ("WARNING", "ERROR")
"""Log levels without the record by which serve knows that an engine is ready, which has INFO."""
SMALL_MODEL_BYTES = 32 << 20
"""Bytes of weights below which an engine gets one thread. Measured with 32 streams on two cores that all parts share:
the demo model (11 MB) generates 1,433 to 1,999 tokens/s on one thread, 964 to 1,002 on two; the reference model
(170 MB) is faster on two.
"""
PROBE_LIMIT_S = 2.0
"""Longest wait for the answer to one probe."""


class DrainStage(IntEnum):
    """Order of shutdown: gateways stop accepting, then engines hand back their requests, and Redis ends last."""

    GATEWAY = 0
    ENGINE = 1
    REDIS = 2


@dataclass(frozen=True)
class Plan:
    """What serve starts."""

    options: ServeOptions
    ports: PortPlan
    model: ModelChoice

    def redis(self, command: Sequence[str]) -> PartSpec:
        """Return the part of serve's own Redis, which is started by `command`."""
        socket = self.ports.redis_socket
        if socket is None:
            raise ValueError("serve has no Redis of its own")
        return PartSpec(
            name=REDIS,
            argv=tuple(command),
            log_path=self.options.data_dir.logs / "redis.log",
            drain_stage=DrainStage.REDIS,
            policy=RestartPolicy(max_proven_delay_s=REDIS_DELAY_S),
            probe=lambda: redis_pong(socket),
        )

    def gateways(self) -> list[PartSpec]:
        """Return the parts of all gateways."""
        return [self._gateway(i) for i in range(self.options.gateways)]

    def engines(self, logs: EngineLogs) -> list[PartSpec]:
        """Return the parts of all engines, spares last; `logs` know which of them are ready."""
        return [self._engine(i, logs) for i in range(self.options.engines + self.options.warm_spares)]

    def _gateway(self, index: int) -> PartSpec:
        ports = self.ports.gateways[index]
        name = f"gateway-{index}"
        argv = [
            sys.executable,
            "-m",
            "pagestream_gateway",
            "--redis",
            self.ports.redis_url,
            "--host",
            self.options.host,
        ]
        argv += [
            "--http-port",
            str(ports.http),
            "--grpc-port",
            str(ports.grpc),
            "--gateway-id",
            f"{name}-{os.getpid()}",
        ]
        if ports.metrics is not None:
            argv += ["--metrics-port", str(ports.metrics), "--metrics-host", self.options.metrics_host]
        if self.options.api_keys is not None:
            argv += ["--api-keys", str(self.options.api_keys.absolute())]
        has_tls = self.options.tls_certificate is not None
        for flag, file in (("--tls-certificate", self.options.tls_certificate), ("--tls-key", self.options.tls_key)):
            argv += [] if file is None else [flag, str(file.absolute())]
        return PartSpec(
            name=name,
            argv=tuple(argv),
            log_path=self.options.data_dir.logs / f"{name}.log",
            drain_stage=DrainStage.GATEWAY,
            env={
                START_VARIABLE: str(self.options.data_dir.loaded_file),
                **self._default_model(),
                **({ALIASES_VARIABLE: self._aliases()} if self.options.aliases else {}),
                **self.options.environment,
            },
            ports=_known({"http": ports.http, "grpc": ports.grpc, "metrics": ports.metrics}),
            probe=lambda: http_ok(self.options.host, ports.http, "/readyz", has_tls=has_tls),
        )

    def _default_model(self) -> dict[str, str]:
        if DEFAULT_MODEL_VARIABLE in os.environ:
            return {}
        return {DEFAULT_MODEL_VARIABLE: self.model.name if self.model.adapter is None else self.model.adapter.name}

    def _aliases(self) -> str:
        served = self.model.name if self.model.adapter is None else self.model.adapter.name
        return ",".join(f"{alias}={served}" for alias in self.options.aliases)

    def _engine(self, index: int, logs: EngineLogs) -> PartSpec:
        name = f"engine-{index}"
        metrics = self.ports.engine_metrics[index]

        async def claims() -> bool:
            return logs.claims(name)

        async def stands_by() -> bool:
            return logs.stands_by(name)

        argv = [sys.executable, "-m", "pagestream_worker", self.model.source, "--redis", self.ports.redis_url]
        argv += [
            "--served-model-name",
            self.model.name,
            "--engine-id",
            engine_name(name, os.getpid()),
            *self.options.engine_arguments,
            *(["--enable-lora"] if self.model.adapter is not None else []),
        ]
        if metrics is not None:
            argv += ["--metrics-port", str(metrics), "--metrics-host", self.options.metrics_host]
        return PartSpec(
            name=name,
            argv=tuple(argv),
            log_path=self.options.data_dir.logs / f"{name}.log",
            drain_stage=DrainStage.ENGINE,
            env={
                **engine_environment(
                    self.options.engines, os.environ, weight_bytes(self.model.source), self.options.warm_spares
                ),
                **({LOG_LEVEL_VARIABLE: "INFO"} if os.environ.get(LOG_LEVEL_VARIABLE) in _TOO_HIGH else {}),
                **self.options.environment,
            },
            ports=_known({"metrics": metrics}),
            probe=claims,
            standby=Standby(("--standby", spare_state(self.options)), stands_by) if self.options.warm_spares else None,
        )


def spare_state(options: ServeOptions) -> str:
    """Return how far a spare starts. A GPU's memory holds one engine, which takes its share of it whole: there a spare
    has imported its modules, elsewhere it has loaded the model.
    """
    arguments = options.engine_arguments
    device = arguments[arguments.index("--device") + 1] if "--device" in arguments else "auto"
    device = os.environ.get(DEVICE_VARIABLE, device) if device == "auto" else device
    has_gpu = any(Path(file).exists() for file in GPU_FILES)
    return "imported" if device == "cuda" or (device == "auto" and has_gpu) else "loaded"


def engine_environment(
    engines: int, environment: Mapping[str, str], weights: int | None, warm_spares: int = 0
) -> dict[str, str]:
    """Return the variables that engines get beside the supervisor's: several engines share the cores, and the weights.

    An engine of a small model gets one thread: its operations end before several threads have synchronized, and the
    synchronization waits for whatever else runs on their cores.

    Args:
        environment: the supervisor's; what it sets is kept.
        weights: bytes of the model's weights; None is not known.
        warm_spares: engines that use no core, but map the weights too.
    """
    chosen = {}
    if weights is not None and weights < SMALL_MODEL_BYTES:
        chosen[THREADS_VARIABLE] = "1"
    else:
        if engines > 1:
            chosen[THREADS_VARIABLE] = str(max((os.cpu_count() or 1) // engines, 1))
        if engines + warm_spares > 1:
            chosen[SHARED_WEIGHTS_VARIABLE] = SHARED_WEIGHTS_GB
    return {name: value for name, value in chosen.items() if name not in environment}


def weight_bytes(source: str) -> int | None:
    """Return the bytes of a model folder's weights; None where it is no local folder."""
    files = list(Path(source).glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) if files else None


def _known(ports: Mapping[str, int | None]) -> dict[str, int]:
    return {name: port for name, port in ports.items() if port is not None}


async def http_ok(host: str, port: int, path: str, *, has_tls: bool = False) -> bool:
    """Whether `GET path` is answered with 200. Needs no HTTP library, so that serve stays small.

    A certificate is not verified: it may name another host than the one that is dialled here.
    """
    context = ssl._create_unverified_context() if has_tls else None  # noqa: S323
    request = f"GET {path} HTTP/1.1\r\nHost: {dial_host(host)}:{port}\r\nConnection: close\r\n\r\n"
    return b" 200 " in await _ask(
        asyncio.open_connection(dial_host(host).strip("[]"), port, ssl=context), request.encode()
    )


async def redis_pong(socket: Path) -> bool:
    """Whether a Redis on this machine answers PING, and so has loaded its files."""
    return await _ask(asyncio.open_unix_connection(socket), b"PING\r\n") == b"+PONG\r\n"


async def _ask(connecting: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]], request: bytes) -> bytes:
    """Return the first line of the answer; empty where there is none."""
    try:
        async with asyncio.timeout(PROBE_LIMIT_S):
            reader, writer = await connecting
            try:
                writer.write(request)
                return await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return b""


@dataclass(frozen=True)
class GatewayPorts:
    """Ports of one gateway."""

    http: int
    grpc: int
    metrics: int | None


@dataclass(frozen=True)
class PortPlan:
    """Ports of all processes."""

    redis_url: str
    redis_socket: Path | None
    """Unix socket of serve's own Redis; None where another one is used."""
    gateways: tuple[GatewayPorts, ...]
    engine_metrics: tuple[int | None, ...]
    """One element for each engine; None without metrics."""


def assign_ports(options: ServeOptions) -> PortPlan:
    """Choose the ports and check that they are free.

    Raises:
        PortTakenError: one that was asked for is in use.
        UsageError: one is out of range or named twice, or Redis' socket has no safe place.
    """
    gateways = tuple(
        GatewayPorts(
            _port(options.http_port, i, options.host),
            _port(options.grpc_port, i, options.host),
            _metrics_port(options, i),
        )
        for i in range(options.gateways)
    )
    num_engines = options.engines + options.warm_spares
    engine_metrics = tuple(_metrics_port(options, options.gateways + i) for i in range(num_engines))
    asked: dict[str, int] = {}
    for i, ports in enumerate(gateways):
        asked[_option("--http-port", i)] = ports.http
        asked[_option("--grpc-port", i)] = ports.grpc
    metrics = [*(ports.metrics for ports in gateways), *engine_metrics]
    require_free(options.host, asked)
    of_metrics = {_option("--metrics-port", i): port for i, port in enumerate(metrics) if port is not None}
    require_free(options.metrics_host, of_metrics, beside=asked)
    if options.redis_url is not None:
        return PortPlan(options.redis_url, None, gateways, engine_metrics)
    redis_url, socket = own_redis(options.data_dir.redis)
    return PortPlan(redis_url, socket, gateways, engine_metrics)


def _port(first: int, offset: int, host: str) -> int:
    return free_port(host) if first == 0 else first + offset


def _metrics_port(options: ServeOptions, offset: int) -> int | None:
    return None if options.metrics_port is None else _port(options.metrics_port, offset, options.metrics_host)


def _option(name: str, offset: int) -> str:
    return name if offset == 0 else f"{name} + {offset}"


READY = "ready"
"""Message of the log record that an engine writes when it begins to claim; the record has its `engine_id`."""
COMPUTES = "the model computes on"
"""Begin of the message of the record that says where, and in which dtype; the record has both."""
STANDING_BY = "standing by"
"""Likewise, of an engine that waits to be asked to join."""


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says of its model at the start; empty and 0 where it hasn't."""

    device: str = ""
    dtype: str = ""
    max_model_len: int = 0
    """Tokens."""


class EngineLogs:
    """Read from the engines' logs which of them claim requests, and under which id (name and boot nonce)."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._standing_by: set[str] = set()
        self.facts = EngineFacts()
        """Of the first engine that said so."""

    def read(self, part: str, line: str) -> None:
        """Read a line of a part's log."""
        if not (READY in line or STANDING_BY in line or COMPUTES in line) or not line.startswith("{"):
            return
        try:
            record = json.loads(line)
        except ValueError:
            return
        if record.get("message") == READY and "engine_id" in record:
            self._ids[part] = str(record["engine_id"])
            self.facts = replace(self.facts, max_model_len=int(record.get("max_model_len", 0)))
        elif "device" in record and str(record.get("message")).startswith(COMPUTES):
            self.facts = replace(self.facts, device=str(record["device"]), dtype=str(record.get("dtype", "")))
        elif record.get("message") == STANDING_BY:
            self._standing_by.add(part)

    def claims(self, part: str) -> bool:
        """Whether the engine of this part claims requests."""
        return part in self._ids

    def stands_by(self, part: str) -> bool:
        """Whether the engine of this part has waited to be asked to join, since its start."""
        return part in self._standing_by

    def forget(self, part: str) -> str | None:
        """Return the id of an engine that died, and remove it; None where it never claimed."""
        self._standing_by.discard(part)
        return self._ids.pop(part, None)


def engine_name(part: str, serve_pid: int) -> str:
    """Return the name of an engine in Redis, which several serves may share."""
    return f"{part}-{serve_pid}"


def engines_left_behind(data_dir: DataDir) -> tuple[str, ...]:
    """Return the engines of a serve that was killed before it could remove its serve.json: they died with it."""
    try:
        record = read_record(data_dir.serve_file)
    except ServeFileInvalidError:
        return ()
    pids = {process.name: process.pid for process in record.processes} if record else {}
    serve = pids.get("serve")
    return () if serve is None else tuple(engine_name(name, serve) for name in pids if name.startswith("engine-"))


_HINT = "`pagestream serve --help-all` lists every setting"
ENGINE_MODULE, GATEWAY_MODULE = "pagestream_worker", "pagestream_gateway"


def check_options(options: ServeOptions) -> None:
    """Check serve's own options.

    Raises:
        UsageError: they contradict each other, or name a file that is not there or that a gateway could not use.
    """
    if options.exit_after_greet and options.greet is None:
        raise UsageError("--exit-after-greet needs --greet PROMPT")
    if options.demo and not is_loopback(options.host):
        raise UsageError(f"--demo is for this machine alone, and --host is {options.host}")
    if options.demo and (options.tls_certificate is not None or options.redis_url is not None):
        raise UsageError("--demo serves without TLS, from a Redis of its own")
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise UsageError("--tls-certificate and --tls-key go together", hint="give both, or neither")
    files = {
        "--api-keys": options.api_keys,
        "--tls-certificate": options.tls_certificate,
        "--tls-key": options.tls_key,
    }
    for flag, file in files.items():
        if file is not None and not file.is_file():
            raise UsageError(f"{flag} {file}: no such file")
    if options.api_keys is not None:
        _check_keys(options.api_keys)
    if options.tls_certificate is not None and options.tls_key is not None:
        _check_tls(options.tls_certificate, options.tls_key)


def _check_keys(file: Path) -> None:
    from pagestream_gateway.auth.authenticator import KeyFile
    from pagestream_gateway.errors import SettingsError

    try:
        KeyFile(file)
    except SettingsError as error:
        raise UsageError(str(error), hint="`pagestream keys new TENANT --file FILE` adds a key") from error


def _check_tls(certificate: Path, key: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--tls-certificate {certificate}: no certificate can be read: {error}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except (OSError, ssl.SSLError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise UsageError(f"--tls-key {key} is not the key of the certificate {certificate}") from error
        raise UsageError(
            f"--tls-key {key} cannot be used with {certificate}: {error}", hint="a PEM file without a passphrase"
        ) from error


def check_parts(parts: Sequence[PartSpec]) -> None:
    """Read each part's command line and environment as the part will: engine options and PAGESTREAM_... variables; and
    compare the options with the model's configuration and this machine.

    Raises:
        UsageError: a value is unknown, malformed or out of range; it is named.
    """
    from pagestream_engine.errors import EngineError
    from pagestream_engine.preflight import check_options as check_engine_options
    from pagestream_gateway import configuration as gateway
    from pagestream_gateway.errors import SettingsError
    from pagestream_worker import settings as worker

    for part in parts:
        environment = {**os.environ, **part.env}
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                if ENGINE_MODULE in part.argv:
                    settings = worker.load_settings(_options_of(part, ENGINE_MODULE), environment)
                    _check_models(settings.worker.models)
                    check_engine_options(settings.worker.model, settings.engine)
                elif GATEWAY_MODULE in part.argv:
                    gateway.load_settings(_options_of(part, GATEWAY_MODULE), environment)
        except SystemExit as error:  # argparse has said what is wrong, below the usage of another program
            raise UsageError(said.getvalue().strip().rpartition("error: ")[2], hint=_HINT) from error
        except (EngineError, SettingsError, ValueError) as error:
            raise UsageError(str(error), hint=_HINT) from error


def _check_models(named: Sequence[str]) -> None:
    """Check the further models that engines may serve: where a folder is named, it has to hold a model."""
    for each in named:
        name, _, folder = each.partition("=")
        if (REPOSITORY.fullmatch(folder) is None or Path(folder).exists()) and (problem := model_problem(Path(folder))):
            raise UsageError(f"--models {name}={folder}: {problem}")


def _options_of(part: PartSpec, module: str) -> list[str]:
    return list(part.argv[part.argv.index(module) + 1 :])
