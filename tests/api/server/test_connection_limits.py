"""What a connection may send, and how long it may take: limits come before work, and other clients notice nothing."""

import asyncio
import gc
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
from pagestream.v1 import inference_pb2 as api
from pagestream_gateway import ConnectionSettings, LimitSettings, Settings
from support.clients.gateway_clients import Address, grpc_stub, issue_certificate, post_events
from support.engines.synthetic_engine import MODEL, SyntheticEngine
from support.processes.waiting import LIMIT_S
from support.protocol.token_streams import eventually
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

SHORT_S = 0.5
MAX_HEADER = 4096
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
JSON = {"Content-Type": "application/json"}
CONNECTIONS = ConnectionSettings(
    max_header_bytes=MAX_HEADER,
    max_header_fields=16,
    header_timeout_s=SHORT_S,
    body_timeout_s=SHORT_S,
    idle_timeout_s=SHORT_S,
)
KERNEL_CONNECTIONS = Path("/proc/net/tcp")
FEW = replace(CONNECTIONS, max_connections=3)
Another = Callable[[Settings], AbstractAsyncContextManager[Address]]


@dataclass(frozen=True)
class Answer:
    """An HTTP answer before the connection's end; the status is 0 where there was none."""

    status: int
    code: str = ""


class Connection:
    """A TCP connection to a gateway's HTTP port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @property
    def port(self) -> int:
        """The client's own port."""
        port: int = self._writer.get_extra_info("sockname")[1]
        return port

    async def send(self, data: bytes) -> None:
        """Write bytes. Raises ConnectionError where the gateway has closed."""
        self._writer.write(data)
        async with asyncio.timeout(LIMIT_S):
            await self._writer.drain()

    async def send_many(self, data: bytes, times: int) -> None:
        """Write the same bytes again and again. Raises ConnectionError where the gateway has closed."""
        for _ in range(times):
            await self.send(data)

    async def first_line(self) -> bytes:
        """Return the first line that the gateway sends."""
        return await self._reader.readline()

    async def until(self, mark: bytes) -> bytes:
        """Return what the gateway sends up to the mark, and the mark."""
        async with asyncio.timeout(LIMIT_S):
            return await self._reader.readuntil(mark)

    async def rest(self) -> bytes:
        """Return what the gateway sends until it closes the connection."""
        async with asyncio.timeout(LIMIT_S):
            return await self._reader.read()

    async def end(self) -> Answer:
        """Return the answer that the gateway closes the connection with."""
        try:
            async with asyncio.timeout(LIMIT_S):
                received = await self._reader.read()
        except ConnectionError:
            return Answer(0)
        head, _, body = received.partition(b"\r\n\r\n")
        if not head:
            return Answer(0)
        assert b"connection: close" in head.lower()
        return Answer(int(head.split()[1]), json.loads(body)["error"]["code"])


@asynccontextmanager
async def connect(address: Address) -> AsyncIterator[Connection]:
    """Open a connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", address.http_port)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def limited(shared_engine: SyntheticEngine, settings: Settings, another: Another) -> AsyncIterator[Address]:
    """Run a gateway with short limits."""
    async with another(replace(settings, connections=CONNECTIONS)) as running:
        yield running


@pytest.fixture
def address(limited: Address, engine: SyntheticEngine) -> Address:
    return limited


async def end_of(address: Address, *parts: bytes) -> Answer:
    """Return how a connection ends over which this was sent."""
    async with connect(address) as connection:
        try:
            for part in parts:
                await connection.send(part)
        except ConnectionError:
            pass  # the answer may have come before the end
        return await connection.end()


@pytest.mark.parametrize(
    "header",
    [
        [b"X-A: " + b"a" * (2 * MAX_HEADER), b"\r\n\r\n"],
        [b"X-A: ", *[b"a" * MAX_HEADER] * 128],
        [b"X-%d: 1\r\n" % number for number in range(100)],
    ],
    ids=["long", "endless", "many-fields"],
)
async def test_a_large_header_is_refused_before_its_end(address: Address, header: list[bytes]) -> None:
    assert await end_of(address, GET, *header) == Answer(431, "header_too_large")


async def test_a_header_of_64_mib_is_not_read(address: Address) -> None:
    async with connect(address) as connection:
        await connection.send(GET + b"X-A: ")
        with pytest.raises(ConnectionError):
            await connection.send_many(b"a" * 2**20, 64)


async def test_an_endless_trailer_and_an_endless_chunk_extension_are_refused(address: Address) -> None:
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    for tail in (b"2\r\n{}\r\n0\r\nX-A: ", b"2;a="):
        assert await end_of(address, chunked + tail, *[b"a" * 2**18] * 2) == Answer(431, "header_too_large")


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", Answer(0)),
        (b"\r\n", Answer(408, "request_timeout")),
        (GET + b"X-A", Answer(408, "request_timeout")),
        (POST + b"Content-Length: 5\r\n\r\n{", Answer(408, "request_timeout")),
        (b"nonsense\r\n\r\n", Answer(400, "malformed_http")),
    ],
    ids=["nothing", "no-line", "header", "body", "nonsense"],
)
async def test_a_stalled_request_ends(address: Address, sent: bytes, answer: Answer) -> None:
    assert await end_of(address, sent) == answer


@pytest.mark.skipif(not KERNEL_CONNECTIONS.exists(), reason="the kernel lists its connections on Linux alone")
async def test_the_kernel_probes_a_silent_connection(address: Address) -> None:
    """Address translation forgets a connection that is silent for minutes, as that of a long whole answer is."""
    async with connect(address) as connection:
        await connection.send(GET + b"\r\n")
        await connection.until(b"\r\n\r\n")
        port, peer = (f":{each:04X}" for each in (address.http_port, connection.port))

        def is_probed() -> bool:
            rows = [line.split() for line in KERNEL_CONNECTIONS.read_text().splitlines()]
            return any(row[1].endswith(port) and row[2].endswith(peer) and row[5].startswith("02:") for row in rows)

        await eventually(is_probed)


async def test_an_idle_connection_ends_after_its_last_answer(address: Address) -> None:
    async with connect(address) as connection:
        await connection.send(GET + b"\r\n")
        await connection.until(b"ok\n")
        assert await connection.rest() == b"", "an answer might be read as that of a later request"


async def test_requests_are_freed_without_the_garbage_collector(address: Address) -> None:
    post = POST.replace(b"/v1/completions", b"/tokenize") + b"Content-Length: 2\r\n\r\n{}"

    def live() -> int:
        # By type: isinstance would ask other libraries' lazy objects for their class.
        kinds = (HttpToolsProtocol, RequestResponseCycle)
        return sum(issubclass(type(each), kinds) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = live()
        for _ in range(20):
            async with connect(address) as connection:
                await connection.send(post * 4)
        await eventually(lambda: live() <= before)
    finally:
        gc.enable()


async def test_a_web_page_can_read_a_refusal_where_it_can_read_answers(
    settings: Settings, engine: SyntheticEngine, another: Another
) -> None:
    for origins in ("localhost", "https://a.example", "*", ""):
        listen = replace(settings.gateway, cors_origins=origins)
        async with another(replace(settings, gateway=listen, connections=CONNECTIONS)) as address:
            for origin in (b"Origin: http://localhost:3000\r\n", b"Origin: https://a.example\r\n", b""):
                found = []
                for rest in (b"\r\n", b"X-A: " + b"a" * (2 * MAX_HEADER) + b"\r\n\r\n"):
                    async with connect(address) as connection:
                        await connection.send(GET + origin + rest)
                        fields = (await connection.until(b"\r\n\r\n")).lower().split(b"\r\n")
                    found.append({each for each in fields if each.startswith((b"access-control-", b"vary:"))})
                assert found[0] == found[1], (origins, origin)


async def test_a_stalled_connection_leaves_streams_alone(address: Address, engine: SyntheticEngine) -> None:
    engine.hold_at = 2
    async with httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 6}
        stream = asyncio.create_task(post_events(client, "/v1/completions", body))
        for _ in range(3):
            assert (await end_of(address, GET)).status == 408
        assert not stream.done()
        engine.go_on()
        _, events = await stream
    assert events[-1].data == "[DONE]"


@pytest.mark.parametrize("following", [b"\r\n", b"GET /heal"])
async def test_what_follows_a_request_does_not_end_its_stream(
    address: Address, engine: SyntheticEngine, following: bytes
) -> None:
    engine.hold_at = 2
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 6, "stream": True}).encode()
    async with connect(address) as connection:
        await connection.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await connection.until(b"data: ")
        await connection.send(following)
        for _ in range(2):
            assert (await end_of(address, GET)).status == 408
        engine.go_on()
        assert b"[DONE]" in await connection.until(b"\r\n0\r\n\r\n")
        assert await connection.end() == Answer(408, "request_timeout")


async def test_a_stream_of_http_1_0_has_no_chunks_and_ends_with_its_connection(address: Address) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2, "stream": True}).encode()
    async with connect(address) as connection:
        await connection.send(POST.replace(b"1.1", b"1.0") + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        head = (await connection.until(b"\r\n\r\n")).lower()
        assert b"connection: close" in head
        assert b"transfer-encoding" not in head
        events = await connection.rest()
    assert all(not line or line.startswith(b"data: ") for line in events.split(b"\n"))
    assert events.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_request_to_change_the_protocol_is_answered_as_any_other(address: Address, is_chunked: bool) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 1}).encode()
    framing, sent = b"Content-Length: %d" % len(body), body
    if is_chunked:
        framing, sent = b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    async with connect(address) as connection:
        await connection.send(POST + upgrade + framing + b"\r\n\r\n" + sent[:5])
        await connection.send(sent[5:] + GET + upgrade + b"\r\n" + GET + b"\r\n")
        assert b"200 OK" in await connection.first_line()
        assert b'"text_completion"' in await connection.until(b'"object":"text_completion"')
        for _ in range(2):
            assert b"200 OK" in await connection.until(b"HTTP/1.1 200 OK")
            await connection.until(b"ok\n")


async def test_a_body_that_nobody_reads_ends(address: Address, settings: Settings) -> None:
    most = settings.limits.max_body_bytes
    async with connect(address) as connection:
        await connection.send(GET + b"Content-Length: 100000000000\r\n\r\n")
        with pytest.raises(ConnectionError):
            await connection.send_many(b"a" * 2**20, most // 2**20 + 64)


async def test_bodies_that_stall_give_way_to_others(
    engine: SyntheticEngine, settings: Settings, another: Another
) -> None:
    """Each lacks its last byte, and together they have all the room that large bodies have."""
    most = 2**20
    limits = LimitSettings(max_body_bytes=most, max_pending_bytes=2 * most)
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).ljust(most).encode()
    async with (
        another(replace(settings, limits=limits)) as address,
        connect(address) as first,
        connect(address) as second,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S) as client,
    ):
        for connection in (first, second):
            await connection.send(POST + b"Content-Length: %d\r\n\r\n" % most + body[:-1])
        answers = await asyncio.gather(*(client.post("/v1/completions", content=body, headers=JSON) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        async with asyncio.timeout(LIMIT_S):
            assert b" 429 " in await first.first_line()


async def test_clients_that_leave_within_a_large_body_give_its_room_back(
    engine: SyntheticEngine, settings: Settings, another: Another
) -> None:
    most = 2**20
    limits = LimitSettings(max_body_bytes=most, max_pending_bytes=most, tokenize_limit_s=LIMIT_S)
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).ljust(most).encode()
    async with (
        another(replace(settings, limits=limits)) as address,
        httpx.AsyncClient(base_url=address.url, timeout=LIMIT_S / 2) as client,
    ):
        for _ in range(3):
            async with connect(address) as connection:
                await connection.send(POST + b"Content-Length: %d\r\n\r\n" % most + body[:-1])
            assert (await client.post("/v1/completions", content=body, headers=JSON)).status_code == 200


async def test_grpc_calls_that_send_nothing_give_way_to_others(
    engine: SyntheticEngine, settings: Settings, another: Another
) -> None:
    """Two calls have all the room that messages have, of two services."""
    limits = LimitSettings(max_body_bytes=2**20, max_arriving_bytes=2**21)
    async with (
        another(replace(settings, limits=limits)) as address,
        grpc.aio.insecure_channel(address.target) as channel,
        grpc_stub(address) as stub,
    ):
        methods = ("pagestream.v1.Inference/Generate", "grpc.health.v1.Health/Check")
        stalled = [channel.stream_stream(f"/{method}")() for method in methods]
        async with asyncio.timeout(LIMIT_S):
            while not any(call.done() for call in stalled):
                assert (await stub.ListModels(api.ListModelsRequest())).models
            codes = {await call.code() for call in stalled if call.done()}
            assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def test_a_grpc_message_that_never_arrives_ends(address: Address) -> None:
    async with grpc.aio.insecure_channel(address.target) as channel, asyncio.timeout(LIMIT_S):
        call = channel.stream_stream("/pagestream.v1.Inference/Generate")()
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        empty = channel.stream_stream("/pagestream.v1.Inference/Generate")()
        await empty.done_writing()
        assert await empty.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_pipelined_requests_and_tiny_chunks_are_bounded(address: Address) -> None:
    assert (await end_of(address, (GET + b"\r\n") * 1000)).status == 0
    tiny = POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 5000
    assert await end_of(address, tiny) == Answer(400, "malformed_http")


async def test_connections_are_bounded(engine: SyntheticEngine, settings: Settings, another: Another) -> None:
    async with another(replace(settings, connections=FEW)) as address:
        held = [await asyncio.open_connection("127.0.0.1", address.http_port) for _ in range(3)]
        assert await end_of(address, GET + b"\r\n") == Answer(503, "too_many_connections")
        for reader, writer in held:  # are closed by the gateway, since they ask for nothing
            async with asyncio.timeout(LIMIT_S):
                assert await reader.read() == b""
            writer.close()
        assert (await end_of(address, GET)).status == 408
        held = [await asyncio.open_connection("127.0.0.1", address.grpc_port) for _ in range(3)]
        reader, writer = await asyncio.open_connection("127.0.0.1", address.grpc_port)
        async with asyncio.timeout(LIMIT_S):
            assert await reader.read() == b""
        for _, each in [*held, (reader, writer)]:
            each.close()


async def test_a_stalled_handshake_ends(
    settings: Settings, engine: SyntheticEngine, another: Another, tmp_path: Path
) -> None:
    certificate, key = issue_certificate(tmp_path, 1)
    listen = replace(settings.gateway, tls_certificate=certificate, tls_key=key)
    async with another(replace(settings, gateway=listen, connections=CONNECTIONS)) as address:
        for port in (address.http_port, address.grpc_port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(LIMIT_S):
                assert await reader.read() == b""
            writer.close()
        context = ssl.create_default_context(cafile=str(certificate))
        async with httpx.AsyncClient(verify=context) as client:
            assert (await client.get(f"https://127.0.0.1:{address.http_port}/healthz")).status_code == 200


async def test_grpc_metadata_is_bounded(address: Address) -> None:
    async with grpc_stub(address) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ListModels(api.ListModelsRequest(), metadata=(("x-a", "a" * (2 * MAX_HEADER)),))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await stub.ListModels(api.ListModelsRequest(), metadata=(("x-a", "a" * (MAX_HEADER // 2)),))
