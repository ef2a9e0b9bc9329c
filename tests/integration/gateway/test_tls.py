"""TLS on both ports, and a certificate that is renewed while the process runs."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from pagestream.v1 import inference_pb2
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream_gateway import Settings, running_gateway
from pagestream_gateway.errors import SettingsError
from pagestream_gateway.settings import GatewaySettings
from pagestream_gateway.tls import Certificate
from support.clients.gateway_clients import Address, issue_certificate
from support.redis.servers import emptied, running_server


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("redis")) as server:
        yield emptied(server)


def settings(redis_url: str, files: tuple[Path, Path]) -> Settings:
    certificate, key = files
    gateway = GatewaySettings(redis=redis_url, http_port=0, grpc_port=0, tls_certificate=certificate, tls_key=key)
    return Settings(gateway=gateway)


async def models_over_grpc(target: str, roots: bytes) -> list[str]:
    async with grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(roots)) as channel:
        stub = InferenceStub(channel)
        answer = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10)
        return [model.id for model in answer.models]


async def status_over_http(port: int, roots: Path) -> int:
    context = ssl.create_default_context(cafile=str(roots))
    async with httpx.AsyncClient(verify=context) as client:
        return (await client.get(f"https://127.0.0.1:{port}/v1/models")).status_code


async def test_both_apis_speak_tls_and_nothing_else(redis_url: str, tmp_path: Path) -> None:
    files = issue_certificate(tmp_path, 1)
    async with running_gateway(settings(redis_url, files)) as ports:
        address = Address(ports.http, ports.grpc)
        assert await status_over_http(ports.http, files[0]) == 200
        assert await models_over_grpc(address.target, files[0].read_bytes()) == []
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(f"{address.url}/v1/models")
        async with grpc.aio.insecure_channel(address.target) as channel:
            stub = InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=2)


async def test_a_renewed_certificate_is_taken_by_new_connections(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagestream_gateway.tls._RELOAD_PERIOD_S", 0.05)
    files = issue_certificate(tmp_path, 1)
    old = tmp_path / "old.crt"
    old.write_bytes(files[0].read_bytes())
    async with running_gateway(settings(redis_url, files)) as ports:
        assert await status_over_http(ports.http, old) == 200
        files = issue_certificate(tmp_path, 2)
        await until_taken(ports.http, files[0])
        assert await models_over_grpc(f"127.0.0.1:{ports.grpc}", files[0].read_bytes()) == []
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await status_over_http(ports.http, old)
        with pytest.raises(grpc.aio.AioRpcError):
            await models_over_grpc(f"127.0.0.1:{ports.grpc}", old.read_bytes())


async def until_taken(port: int, roots: Path) -> None:
    for _ in range(200):
        try:
            assert await status_over_http(port, roots) == 200
        except httpx.ConnectError:
            continue
        return
    pytest.fail("the new certificate was not taken")


def test_files_that_do_not_fit_are_ignored_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate, key = issue_certificate(tmp_path, 1)
    held = Certificate(certificate, key)
    assert not held.refresh()
    good = key.read_bytes()
    key.write_bytes(b"no key")
    assert not held.refresh()
    assert "cannot use the certificate" in caplog.text
    key.write_bytes(good)
    issue_certificate(tmp_path, 2)
    assert held.refresh()
    assert not held.refresh()


def test_what_can_not_be_read_is_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--tls-certificate .*nothing\.crt"):
        Certificate(tmp_path / "nothing.crt", tmp_path / "nothing.key")
    certificate, key = issue_certificate(tmp_path, 1)
    key.write_bytes(b"no key")
    with pytest.raises(SettingsError, match="--tls-key"):
        Certificate(certificate, key)
