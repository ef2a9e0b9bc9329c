"""A real OpenTelemetry Collector with the chart's configuration, between exporters and sinks of a test."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import yaml
from support.processes.stack import free_port
from support.processes.waiting import wait_until
from support.redis.servers import skip_for_want_of

SHIPPED = Path(__file__).resolve().parents[3] / "deploy" / "otel" / "collector.yaml"
_START_LIMIT_S = 30.0


def collector_binary() -> str:
    """The path of a collector. Skips the test without one."""
    for name in ("otelcol", "otelcol-contrib"):
        found = shutil.which(name)
        if found is not None:
            return found
    skip_for_want_of("otelcol", "no otelcol is on the PATH")
    raise AssertionError


@contextmanager
def running_collector(folder: Path, sinks: Sequence[int], resource: dict[str, str] | None = None) -> Iterator[int]:
    """A collector that passes metrics on to the sinks at these ports of this machine; yields its own OTLP/gRPC port.

    `resource`: attributes that it adds to every resource, as a cluster's collector may.
    """
    port, health = free_port(), free_port()
    config = folder / "collector.yaml"
    config.write_text(yaml.safe_dump(_configuration(sinks, port, health, resource or {})))
    log = folder / "collector.log"
    with log.open("wb") as out:
        process = subprocess.Popen([collector_binary(), "--config", str(config)], stdout=out, stderr=out)
    try:
        wait_until(
            lambda: process.poll() is not None or _is_healthy(health), "the collector is healthy", _START_LIMIT_S
        )
        if process.poll() is not None:
            raise RuntimeError(f"the collector ended: {log.read_text()[-2000:]}")
        yield port
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _configuration(sinks: Sequence[int], port: int, health: int, resource: dict[str, str]) -> dict[str, Any]:
    """The chart's configuration with this machine's ports, the given sinks as replicas in plain text, and no
    Prometheus.
    """
    config: dict[str, Any] = yaml.safe_load(SHIPPED.read_text())
    config["receivers"]["otlp"]["protocols"] = {"grpc": {"endpoint": f"127.0.0.1:{port}"}}
    config["extensions"]["health_check"]["endpoint"] = f"127.0.0.1:{health}"
    shipped = next(each for name, each in config["exporters"].items() if name.startswith("otlp"))
    shipped = {name: value for name, value in shipped.items() if name != "headers"} | {"tls": {"insecure": True}}
    config["exporters"] = {
        f"otlp_grpc/operator-{index}": {**shipped, "endpoint": f"127.0.0.1:{sink}"} for index, sink in enumerate(sinks)
    }
    config["processors"]["resource"] = {
        "attributes": [
            {"key": key, "value": value, "action": "insert"} for key, value in {"added": "yes", **resource}.items()
        ]
    }
    pipeline = config["service"]["pipelines"]["metrics/operators"]
    processors = [name for name in pipeline["processors"] if name != "batch"]
    pipeline = {**pipeline, "processors": [*processors, "resource", "batch"], "exporters": [*config["exporters"]]}
    config["service"]["pipelines"] = {"metrics/operators": pipeline}
    return config


def _is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/", timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
