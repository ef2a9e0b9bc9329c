"""The defaults, against those of what a client talks to."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from pagestream_client import Reconnection, Transport
from pagestream_gateway.api.grpc import server
from pagestream_gateway.settings import Settings, StreamSettings
from pagestream_streams import StreamsSettings

JITTER_S = 0.5


def test_a_quiet_stream_leaves_a_dead_gateway_before_its_request_is_cancelled() -> None:
    transport, reconnection, streams = Transport(), Reconnection(), StreamsSettings()
    noticed_s = transport.keepalive_s + transport.keepalive_timeout_s
    also_dead_s = reconnection.first_delay_s + transport.connect_timeout_s
    resumed_s = noticed_s + also_dead_s + reconnection.first_delay_s
    lease_s = (streams.lease_ms - streams.heartbeat_ms) / 1000  # the gateway may die just before its next beat
    assert resumed_s < lease_s + StreamSettings().disconnect_grace_s


async def test_gateways_permit_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    make = server.named_calls_server

    def recorded(*, options: Sequence[tuple[str, Any]], **others: Any) -> grpc.aio.Server:
        given.update(options)
        return make(options=options, **others)

    monkeypatch.setattr(server, "named_calls_server", recorded)
    gateway: Any = SimpleNamespace(settings=Settings(), pending=None)
    server.GrpcServer(gateway, max_connections=1)
    least_s = given["grpc.http2.min_ping_interval_without_data_ms"] / 1000
    assert Transport().keepalive_s >= least_s + JITTER_S
