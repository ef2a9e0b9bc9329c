"""The files for Docker Compose and kind: their settings are read by the programs that they start."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagestream_gateway import load_settings as gateway_settings
from pagestream_worker import load_settings as engine_settings
from support.processes.waiting import LIMIT_S

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = DEPLOY / "compose" / "compose.yaml"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", COMPOSE.read_text())
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def test_settings_are_the_programs_own(services: dict[str, Any]) -> None:
    gateway = gateway_settings([], services["gateway"]["environment"])
    assert gateway.gateway.redis == "redis://redis:6379/0"
    _, *arguments = services["engine"]["command"]
    engine = engine_settings(arguments, services["engine"]["environment"])
    assert engine.worker.model == "/models/served"
    assert engine.worker.served_model_name == "demo"


def test_images_are_built_from_files_that_are_there(services: dict[str, Any]) -> None:
    for name in ("gateway", "engine"):
        build = services[name]["build"]
        context = (COMPOSE.parent / build["context"]).resolve()
        assert (context / build["dockerfile"]).is_file()
    (mount,) = services["engine"]["volumes"]
    assert (COMPOSE.parent / mount.split(":")[0] / "config.json").is_file()


def test_nothing_runs_with_rights_or_is_open_to_others(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_redis_keeps_what_was_accepted(services: dict[str, Any]) -> None:
    command = services["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert services["redis"]["volumes"] == ["redis:/data"]


def test_kind_leads_the_gateways_ports_out() -> None:
    cluster = yaml.safe_load((DEPLOY / "kind" / "kind.yaml").read_text())
    ports = {each["hostPort"]: each["containerPort"] for each in cluster["nodes"][0]["extraPortMappings"]}
    script = (DEPLOY / "kind" / "up.sh").read_text()
    nodes = {int(port): int(node) for port, node in re.findall(r'"port": (\d+), "nodePort": (\d+)', script)}
    assert ports == nodes == {8000: 30080, 50051: 30051}
    subprocess.run(["bash", "-n", str(DEPLOY / "kind" / "up.sh")], check=True, timeout=LIMIT_S)
