"""Gateways in the test's own event loop, and clients of their two APIs."""

import hashlib
import json
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
from google.rpc import error_details_pb2, status_pb2
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream_gateway import GatewaySettings, Settings, ShutdownSettings, StreamSettings, running_gateway
from redis.asyncio import Redis


@dataclass(frozen=True)
class Address:
    """Where a gateway is reached."""

    http_port: int
    grpc_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"


@dataclass(frozen=True)
class Event:
    """A server-sent event."""

    id: str
    """Empty where it has none."""
    data: str

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.data)
        return body

    @property
    def position(self) -> str:
        """Position after the event; empty for [DONE], which has none."""
        return "" if self.data == "[DONE]" else str(self.body["stream_position"])

    @property
    def next_index(self) -> int:
        """Index of that position; -1 for [DONE]."""
        return int(self.position.split("/")[1]) if self.position else -1


@dataclass(frozen=True)
class Refusal:
    """A gRPC error with its details."""

    code: grpc.StatusCode
    message: str
    fields: list[str]
    retry_after_s: float | None


def gateway_settings(
    redis_url: str, *, grace_s: float = 10.0, keep_alive_s: float = 15.0, keys: Path | None = None
) -> Settings:
    """Return settings with free ports and a short drain."""
    return Settings(
        gateway=GatewaySettings(redis=redis_url, http_port=0, grpc_port=0, api_keys=keys),
        stream=StreamSettings(keep_alive_s=keep_alive_s, disconnect_grace_s=grace_s),
        shutdown=ShutdownSettings(drain_s=0.05, close_limit_s=5.0),
    )


def write_keys(path: Path, tenants: Mapping[str, str]) -> Path:
    """Write a file of API keys, or of administrators' keys, by whom they name."""
    lines = [f"{hashlib.sha256(key.encode()).hexdigest()} -> {name}\n" for key, name in tenants.items()]
    path.write_text("".join(lines))
    return path


def bearer(key: str) -> dict[str, str]:
    """Return the header field that carries a key."""
    return {"Authorization": f"Bearer {key}"}


def issue_certificate(folder: Path, serial: int) -> tuple[Path, Path]:
    """Write a self-signed certificate for the loopback address; return its file and its key's, the same each time."""
    certificate, key = folder / "tls.crt", folder / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-set_serial", str(serial)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@asynccontextmanager
async def running_address(settings: Settings) -> AsyncIterator[Address]:
    """Run a gateway in this event loop."""
    async with running_gateway(settings) as ports:
        yield Address(ports.http, ports.grpc)


async def serving(addresses: Sequence[Address]) -> int:
    """Return the place of the first gateway that has an open stream."""
    for place, address in enumerate(addresses):
        async with httpx.AsyncClient(base_url=address.url) as client:
            if "pagestream_streams_open 0.0" not in (await client.get("/metrics")).text:
                return place
    raise AssertionError("no gateway has an open stream")


@asynccontextmanager
async def grpc_stub(address: Address, *, key: str | None = None) -> AsyncIterator[InferenceStub]:
    """Open a stub; with a key, its calls carry it."""
    async with grpc.aio.insecure_channel(address.target) as channel:
        stub = InferenceStub(channel)
        if key is not None:
            for name, call in vars(stub).items():
                setattr(stub, name, partial(call, metadata=(("authorization", f"Bearer {key}"),)))
        yield stub


def refusal(error: grpc.aio.AioRpcError) -> Refusal:
    """Return an error's status with its details."""
    fields: list[str] = []
    retry_after_s = None
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        for detail in status_pb2.Status.FromString(value).details:
            bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            if detail.Unpack(bad):
                fields += [violation.field for violation in bad.field_violations]
            elif detail.Unpack(retry):
                retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return Refusal(error.code(), error.details() or "", fields, retry_after_s)


async def sse_events(response: httpx.Response) -> AsyncIterator[Event]:
    """Yield the events of an answer, without comments."""
    event_id = data = ""
    async for line in response.aiter_lines():
        if line.startswith("id:"):
            event_id = line[3:].strip()
        elif line.startswith("data:"):
            data = line[5:].strip()
        elif not line and data:
            yield Event(event_id, data)
            event_id = data = ""


async def post_events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[str, list[Event]]:
    """Return the request id and all events of a streamed answer."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        if response.status_code != httpx.codes.OK:
            raise AssertionError(f"{response.status_code}: {(await response.aread()).decode()}")
        return response.headers["X-Request-Id"], [event async for event in sse_events(response)]


async def get_events(
    client: httpx.AsyncClient, request_id: str, *, after: str | None = None, query: str = ""
) -> list[Event]:
    """Return all events of a resumed answer."""
    headers = {} if after is None else {"Last-Event-ID": after}
    async with client.stream("GET", f"/v1/requests/{request_id}/events{query}", headers=headers) as response:
        if response.status_code != httpx.codes.OK:
            raise AssertionError(f"{response.status_code}: {(await response.aread()).decode()}")
        return [event async for event in sse_events(response)]


def chat_text(events: Sequence[Event], choice: int = 0) -> str:
    """Return the text of one choice of a streamed chat."""
    bodies = [event.body for event in events if event.data != "[DONE]"]
    return "".join(
        each["delta"].get("content") or "" for body in bodies for each in body["choices"] if each["index"] == choice
    )


async def lose(redis_url: str, request_id: str) -> None:
    """Delete all keys of a request, as a Redis that lost its last second would."""
    async with Redis.from_url(redis_url) as redis:
        keys = [key async for key in redis.scan_iter(f"*{request_id}*")]
        assert keys
        await redis.delete(*keys)
