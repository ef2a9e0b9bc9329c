"""The sink behind TLS and a token: who gets in, and files that are replaced while it runs."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import grpc.aio
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from pagestream_operator.errors import SinkFileInvalid
from pagestream_operator.metrics import MetricsSink, MetricsStore, SinkAccess, SinkAccessSettings, SinkSettings
from support.clients.gateway_clients import issue_certificate
from support.telemetry.otlp_messages import engine, export

LOCAL = SinkSettings(host="127.0.0.1", port=0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def exported(port: int, *, ca: bytes | None = None, token: str | None = None) -> grpc.StatusCode:
    """The status of one export over a connection of its own."""
    address = f"127.0.0.1:{port}"
    if ca is None:
        channel = grpc.aio.insecure_channel(address)
    else:
        channel = grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca))
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    async with channel:
        try:
            await MetricsServiceStub(channel).Export(export(engine(time.time())), metadata=metadata, timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_a_sender_needs_tls_and_the_token(tmp_path: Path) -> None:
    certificate, key = issue_certificate(tmp_path, 1)
    (tmp_path / "token").write_text("right\n")
    store = MetricsStore()
    access = SinkAccess(SinkAccessSettings(certificate, key, tmp_path / "token"))
    async with MetricsSink(store, LOCAL, access=access) as sink:
        assert await exported(sink.port, token="right") is grpc.StatusCode.UNAVAILABLE, "plain text"
        assert await exported(sink.port, ca=certificate.read_bytes()) is grpc.StatusCode.UNAUTHENTICATED
        assert await exported(sink.port, ca=certificate.read_bytes(), token="wrong") is grpc.StatusCode.UNAUTHENTICATED
        assert store.observe(namespace="ns", pool="demo", model="demo", pods=["pod-0"]).samples == {}
        assert await exported(sink.port, ca=certificate.read_bytes(), token="right") is grpc.StatusCode.OK
    assert store.outcomes == {"unauthenticated": 2, "accepted": 3}


async def test_a_replaced_certificate_is_used_for_the_next_connection(tmp_path: Path) -> None:
    certificate, key = issue_certificate(tmp_path, 1)
    old = certificate.read_bytes()
    async with MetricsSink(MetricsStore(), LOCAL, access=SinkAccess(SinkAccessSettings(certificate, key))) as sink:
        assert await exported(sink.port, ca=old) is grpc.StatusCode.OK
        key.write_text("half of a key")
        assert await exported(sink.port, ca=old) is grpc.StatusCode.OK, "while the new one is being written"
        issue_certificate(tmp_path, 2)
        assert await exported(sink.port, ca=certificate.read_bytes()) is grpc.StatusCode.OK
        assert await exported(sink.port, ca=old) is grpc.StatusCode.UNAVAILABLE


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "collector"), ("authorization", f"Bearer {token}")]


def test_a_replaced_token_counts_until_its_senders_have_the_new_one(tmp_path: Path) -> None:
    file, clock = tmp_path / "token", Clock()
    file.write_text("old")
    access = SinkAccess(SinkAccessSettings(token_file=file, rotation_s=60), clock=clock)
    assert (access.admits(bearer("old")), access.admits(bearer("new"))) == (True, False)
    file.write_text("new")
    clock.now = 2
    assert (access.admits(bearer("old")), access.admits(bearer("new"))) == (True, True)
    file.unlink()
    clock.now = 30
    assert access.admits(bearer("new")), "a file that is missing for a moment"
    clock.now = 63
    assert (access.admits(bearer("old")), access.admits(bearer("new"))) == (False, True)


@pytest.mark.parametrize("headers", [None, [], [("authorization", "right")], [("authorization", "Basic right")]])
def test_what_is_no_bearer_token_is_refused(tmp_path: Path, headers: list[tuple[str, str | bytes]] | None) -> None:
    (tmp_path / "token").write_text("right")
    assert not SinkAccess(SinkAccessSettings(token_file=tmp_path / "token")).admits(headers)


def test_a_missing_file_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("\n")
    for settings in (
        SinkAccessSettings(tmp_path / "no.crt", tmp_path / "no.key"),
        SinkAccessSettings(token_file=tmp_path / "none"),
        SinkAccessSettings(token_file=tmp_path / "token"),
    ):
        with pytest.raises(SinkFileInvalid, match=r"no\.key|none|has no token"):
            SinkAccess(settings)
