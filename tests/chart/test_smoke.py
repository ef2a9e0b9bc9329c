"""What `helm test` runs, against real gateways, a real engine and a real Redis on this machine."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kubernetes.chart import CHART
from support.processes.stack import Gateway, Stack, running_stack
from support.processes.waiting import LIMIT_S

pytestmark = [pytest.mark.kube, pytest.mark.served]

SMOKE = CHART / "files" / "smoke.py"
KEY = "ps-tests"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("smoke")
    keys = folder / "keys"
    keys.write_text(f"{hashlib.sha256(KEY.encode()).hexdigest()} -> default\n")
    with running_stack(folder / "stack", gateways=0, is_forked=True) as stack:
        stack.add_gateway("--api-keys", str(keys))
        stack.add_gateway()
        stack.wait_ready()
        yield stack


def smoke(gateway: Gateway, **settings: str) -> subprocess.CompletedProcess[str]:
    places = {"SMOKE_HTTP_URL": gateway.url, "SMOKE_GRPC_TARGET": gateway.grpc_target, "SMOKE_LIMIT_S": "30"}
    environment = {**os.environ, **places, **{f"SMOKE_{name.upper()}": value for name, value in settings.items()}}
    command = [sys.executable, str(SMOKE)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_streams_by_both_apis_with_a_key_and_refusals_without_one(stack: Stack) -> None:
    result = smoke(stack.gateways[0], keys_asked="true", api_key=KEY)
    assert result.returncode == 0, result.stderr
    assert "without a key is 401 and UNAUTHENTICATED" in result.stdout
    assert "demo over HTTP, twice the same from the log" in result.stdout
    assert "demo over gRPC" in result.stdout


def test_a_wrong_key_is_told_at_once(stack: Stack) -> None:
    result = smoke(stack.gateways[0], keys_asked="true", api_key="ps-wrong")
    assert result.returncode == 1
    assert "401" in result.stderr


def test_without_a_key_only_the_refusal_is_tested(stack: Stack) -> None:
    result = smoke(stack.gateways[0], keys_asked="true")
    assert result.returncode == 0, result.stderr
    assert "streams are not tested" in result.stdout


def test_a_gateway_that_asks_for_no_key_where_it_should_is_found(stack: Stack) -> None:
    result = smoke(stack.gateways[1], keys_asked="true", api_key=KEY)
    assert result.returncode == 1
    assert "401 was expected" in result.stderr


def test_an_open_gateway_streams(stack: Stack) -> None:
    result = smoke(stack.gateways[1], model="demo")
    assert result.returncode == 0, result.stderr
    assert "demo over gRPC" in result.stdout


def test_a_gateway_with_tls_streams(stack: Stack, tmp_path: Path) -> None:
    certificate, key = str(tmp_path / "tls.crt"), str(tmp_path / "tls.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", certificate, "-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    gateway = stack.add_gateway("--tls-certificate", certificate, "--tls-key", key)
    url = gateway.url.replace("http:", "https:")
    result = smoke(gateway, http_url=url, ca_file=certificate, model="demo")
    assert result.returncode == 0, result.stderr
    assert "demo over gRPC" in result.stdout


def test_a_model_that_does_not_exist_fails_after_the_limit(stack: Stack) -> None:
    result = smoke(stack.gateways[1], model="nobody", limit_s="2")
    assert result.returncode == 1
    assert "waiting for a stream of nobody over HTTP failed" in result.stderr
