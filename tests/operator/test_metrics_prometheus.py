"""The second source against a real Prometheus, and against servers that are none."""

from __future__ import annotations

import asyncio
import http.server
import json
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml
from pagestream_operator import SourceUnavailable
from pagestream_operator.metrics import MetricsStore, PoolMetrics, PrometheusSettings, PrometheusSource
from support.clients.gateway_clients import issue_certificate
from support.kubernetes.api import kube_binary
from support.kubernetes.control_plane import ControlPlane, eventually
from support.kubernetes.operator_process import PoolWorld, running_operator
from support.processes.part import Part
from support.processes.stack import free_port
from support.processes.waiting import LIMIT_S, until, wait_until

TARGETS = {
    "/engine": {"k8s_namespace_name": "ns", "k8s_pod_name": "pod-0", "pagestream_pool": "demo"},
    "/gateway": {"k8s_namespace_name": "ns", "k8s_pod_name": "gw-0"},
}
MODEL = 'gen_ai_request_model="demo"'


class Pages(http.server.ThreadingHTTPServer):
    """An HTTP server of pages by path; other paths are 404."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages: dict[str, str] = {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        page = server.pages.get(self.path) if isinstance(server, Pages) else None
        self.send_response(404 if page is None else 200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write((page or "").encode())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class' name
        """Log nothing."""


@pytest.fixture
def pages() -> Iterator[Pages]:
    """Serve pages on a port of this machine."""
    with Pages() as pages:
        thread = threading.Thread(target=pages.serve_forever, daemon=True)
        thread.start()
        try:
            yield pages
        finally:
            pages.shutdown()
            thread.join(LIMIT_S)


@contextmanager
def running_prometheus(
    folder: Path, pages: Pages, targets: Mapping[str, Mapping[str, str]], port: int | None = None
) -> Iterator[str]:
    """Run a Prometheus that scrapes these paths every second, with these labels; yield its URL."""
    port = port or free_port()
    scrapes = [
        {
            "job_name": path.strip("/"),
            "metrics_path": path,
            "static_configs": [{"targets": [pages.address], "labels": dict(labels)}],
        }
        for path, labels in targets.items()
    ]
    config = folder / "prometheus.yaml"
    settings = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": scrapes}
    config.write_text(yaml.safe_dump(settings))
    command = [kube_binary("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command.append(f"--web.listen-address=127.0.0.1:{port}")
    part = Part("prometheus", command, folder / "prometheus.log")
    part.start()
    try:
        wait_until(lambda: _is_ready(port), f"a Prometheus that is ready; see {part.log}")
        yield f"http://127.0.0.1:{port}"
    finally:
        part.stop()


def _is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def engine_page(utilization: float, prompt_tokens: int) -> str:
    return f"""
# TYPE pagestream_kv_utilization_ratio gauge
pagestream_kv_utilization_ratio{{{MODEL}}} {utilization}
pagestream_requests_running{{{MODEL}}} 3
pagestream_requests_waiting{{{MODEL}}} 1
pagestream_engine_draining_ratio{{{MODEL}}} 0
pagestream_engine_startup_duration_seconds{{{MODEL}}} 4.5
# TYPE pagestream_tokens_prompt_total counter
pagestream_tokens_prompt_total{{{MODEL}}} {prompt_tokens}
pagestream_somebody_else_s 5
"""


def gateway_page(late: int) -> str:
    latency = "gen_ai_server_time_to_first_token_seconds"
    labels = f'{MODEL},gen_ai_operation_name="chat"'
    return f"""
pagestream_queue_tokens{{{MODEL}}} 900
pagestream_queue_running{{{MODEL}}} 6
pagestream_queue_drain_rate_per_second{{{MODEL}}} 250
pagestream_queue_depth{{{MODEL},partition="0",class="normal"}} 3
pagestream_queue_depth{{{MODEL},partition="1",class="normal"}} 4
pagestream_queue_age_seconds{{{MODEL},partition="0",class="normal"}} 0.5
pagestream_queue_age_seconds{{{MODEL},partition="1",class="normal"}} 2.5
# TYPE {latency} histogram
{latency}_bucket{{{labels},le="1.0"}} 10
{latency}_bucket{{{labels},le="2.5"}} 15
{latency}_bucket{{{labels},le="+Inf"}} {15 + late}
{latency}_sum{{{labels}}} 30
{latency}_count{{{labels}}} {15 + late}
"""


def observed(store: MetricsStore) -> PoolMetrics:
    return store.observe(namespace="ns", pool="demo", model="demo", pods=["pod-0"])


@pytest.mark.kube
async def test_what_prometheus_scrapes_arrives_with_the_time_of_its_scrape(tmp_path: Path, pages: Pages) -> None:
    store = MetricsStore()
    began = time.time()
    pages.pages = {"/engine": engine_page(0.4, 1000), "/gateway": gateway_page(0)}
    with running_prometheus(tmp_path, pages, TARGETS) as url:
        source = PrometheusSource(store, PrometheusSettings(url, interval_s=0.1))
        stopping = asyncio.Event()
        running = asyncio.create_task(source.run(stopping))
        try:
            await until(
                lambda: bool(observed(store).samples) and observed(store).queue is not None, "the first scrapes"
            )
            seen = observed(store)
            sample, queue = seen.samples["pod-0"], seen.queue
            assert queue is not None
            assert (sample.kv_utilization, sample.running, sample.waiting, sample.startup_s) == (0.4, 3, 1, 4.5)
            assert (queue.tokens, queue.depth, queue.age_s, queue.running) == (900, 7, 2.5, 6)
            assert queue.drain_tokens_per_s == 250
            assert began <= sample.time_s <= time.time()

            pages.pages = {"/engine": engine_page(0.9, 1600), "/gateway": gateway_page(7)}
            await until(lambda: observed(store).samples["pod-0"].kv_utilization == 0.9, "the next scrape")
            await until(lambda: sum(_ttft(store)) == 7, "the latencies")
            rate = observed(store).samples["pod-0"].prompt_tokens_per_s
            assert rate is not None
            assert 0 < rate <= 600
            assert _ttft(store) == (0, 0, 7)

            del pages.pages["/engine"]
            last = observed(store).samples["pod-0"].time_s
            await until(lambda: _queue_time(store) > last + 2, "scrapes of the gateway alone")
            assert observed(store).samples["pod-0"].time_s <= last + 1.1  # the last scrape that had it stays the last
        finally:
            stopping.set()
            await asyncio.wait_for(running, LIMIT_S)
    assert store.outcomes["absurd"] == 0


def _ttft(store: MetricsStore) -> tuple[float, ...]:
    window = observed(store).ttft
    return window.counts if window is not None else ()


def _queue_time(store: MetricsStore) -> float:
    queue = observed(store).queue
    return queue.time_s if queue is not None else 0.0


@pytest.mark.kube
@pytest.mark.slow
async def test_a_prometheus_that_restarts_is_asked_on(tmp_path: Path, pages: Pages) -> None:
    store = MetricsStore()
    pages.pages = {"/engine": engine_page(0.4, 1000), "/gateway": gateway_page(0)}
    with running_prometheus(tmp_path, pages, TARGETS) as url:
        port = int(url.rpartition(":")[2])
    source = PrometheusSource(store, PrometheusSettings(url, interval_s=0.1))
    with pytest.raises(SourceUnavailable, match=rf"127\.0\.0\.1:{port}"):
        await source.poll()
    stopping = asyncio.Event()
    running = asyncio.create_task(source.run(stopping))
    try:
        with running_prometheus(tmp_path, pages, TARGETS, port):
            await until(lambda: bool(observed(store).samples), "the samples after the restart")
    finally:
        stopping.set()
        await asyncio.wait_for(running, LIMIT_S)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "not json",
        "[]",
        "{}",
        '{"status":"error","data":{"resultType":""},"error":"query too long"}',
        '{"status":"success","data":{"resultType":"vector","result":[]}}',
        '{"status":"success","data":{"resultType":"matrix","result":[{"metric":{}}]}}',
        '{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[[1]]}]}}',
        '{"status":"success","data":{"resultType":"matrix","result":[{"metric":{},"values":[[1,"x"]]}]}}',
    ],
)
async def test_what_is_no_answer_is_named(answer: str) -> None:
    async with _answering(answer.encode()) as url:
        with pytest.raises(SourceUnavailable, match=r"127\.0\.0\.1"):
            await PrometheusSource(MetricsStore(), PrometheusSettings(url)).poll()


async def test_an_answer_without_an_end_is_cut() -> None:
    async with _answering(b"x" * 100_000) as url:
        with pytest.raises(SourceUnavailable, match="more than 1000 bytes"):
            await PrometheusSource(MetricsStore(), PrometheusSettings(url, max_answer_bytes=1000)).poll()


async def test_refusals_are_reported_and_tokens_sent(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    heard: list[bytes] = []
    async with _answering(b"go away", status="403 Forbidden", heard=heard) as url:
        settings = PrometheusSettings(url, bearer_token_file=token, matchers='k8s_namespace_name="ns"')
        with pytest.raises(SourceUnavailable, match="HTTP 403: go away"):
            await PrometheusSource(MetricsStore(), settings).poll()
    assert b"authorization: bearer s3cret" in heard[0].lower()
    assert b"k8s_namespace_name%3D%22ns%22" in heard[0]


async def test_the_authority_of_its_certificate_is_read_again_after_a_failure(tmp_path: Path) -> None:
    """It may be mounted late, and be replaced."""
    certificate, key = issue_certificate(tmp_path, 1)
    authority = tmp_path / "ca.crt"
    heard: list[bytes] = []
    answer = b'{"status":"success","data":{"resultType":"matrix","result":[]}}'
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server_side.load_cert_chain(certificate, key)
    async with _answering(answer, heard=heard, tls=server_side) as url:
        source = PrometheusSource(MetricsStore(), PrometheusSettings(url, interval_s=0.05, ca_file=authority))
        with pytest.raises(SourceUnavailable, match=r"the CA in .*ca\.crt can't be used"):
            await source.poll()
        stopping = asyncio.Event()
        running = asyncio.create_task(source.run(stopping))
        try:
            shutil.copy(certificate, authority)
            await until(lambda: len(heard) > 1, "answers over TLS")
        finally:
            stopping.set()
            await asyncio.wait_for(running, LIMIT_S)


async def test_absurd_series_are_counted_and_harm_nothing() -> None:
    now = time.time()
    bucket = {"__name__": "gen_ai_server_time_to_first_token_seconds_bucket", "k8s_pod_name": "gw-0"}
    result = [
        {"metric": {**bucket, "le": "1"}, "values": [[now, "5"]]},  # no bucket without a bound
        {"metric": {**bucket, "le": "x", "n": "1"}, "values": [[now, "5"]]},
        {"metric": {"__name__": "pagestream_requests_running"}, "values": [[now, "5"]]},
        {"metric": {"__name__": "pagestream_tokens_prompt_total", "pod": "p"}, "values": [[now, "NaN"]]},
        {"metric": {"__name__": "other", "pod": "p"}, "values": [[now, "1"]]},
    ]
    body = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}})
    store = MetricsStore()
    async with _answering(body.encode()) as url:
        await PrometheusSource(store, PrometheusSettings(url)).poll()
    assert store.outcomes == {"anonymous": 1, "absurd": 2, "unknown": 1}


class _answering:  # noqa: N801 -- used as a function
    """An HTTP server that says one thing."""

    def __init__(
        self,
        body: bytes,
        *,
        status: str = "200 OK",
        heard: list[bytes] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self._answer = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
        self._heard = [] if heard is None else heard

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        )
        self._heard.append(head + await reader.readexactly(length))
        writer.write(self._answer)
        try:
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except ConnectionError:
            return


@pytest.mark.kube
@pytest.mark.slow
def test_an_operator_with_the_setting_queries_prometheus(
    kube: ControlPlane, new_world: Callable[[], PoolWorld], tmp_path: Path, pages: Pages
) -> None:
    world = new_world()
    world.create("asked", minReplicas=1, maxReplicas=3)
    with (
        running_prometheus(tmp_path, pages, {"/engine": {"k8s_namespace_name": world.namespace}}) as url,
        running_operator(kube, world.namespace, PROMETHEUS_URL=url),
    ):
        (pod,) = eventually(lambda: world.make_ready("asked", 1), "a pod")
        labels = f'{{k8s_pod_name="{pod}",pagestream_pool="asked",gen_ai_request_model="demo"}}'
        queue = '{k8s_pod_name="gw-0",gen_ai_request_model="demo"}'.replace("demo", "asked")
        pages.pages["/engine"] = f"""
pagestream_kv_utilization_ratio{labels} 0.95
pagestream_requests_running{labels} 9
pagestream_requests_waiting{labels} 0
pagestream_queue_tokens{queue} 0
pagestream_queue_running{queue} 9
"""
        world.wait_replicas(2, "asked")
        status = eventually(lambda: world.pool("asked")["status"].get("kvUtilization") == "95%", "the status")
    assert status
