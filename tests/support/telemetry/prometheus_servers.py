"""A real Prometheus that scrapes the pages of a test."""

from __future__ import annotations

import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import yaml
from support.processes.stack import free_port
from support.processes.waiting import wait_until
from support.redis.servers import skip_for_want_of

_START_LIMIT_S = 60.0


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


@contextmanager
def serving_pages() -> Iterator[Pages]:
    """Serve pages on a port of this machine."""
    with Pages() as pages:
        thread = threading.Thread(target=pages.serve_forever, daemon=True)
        thread.start()
        try:
            yield pages
        finally:
            pages.shutdown()
            thread.join(10)


@contextmanager
def running_prometheus(
    folder: Path, pages: Pages, targets: Mapping[str, Mapping[str, str]], port: int | None = None
) -> Iterator[str]:
    """Run a Prometheus that scrapes these paths every second, with these labels; yields its URL."""
    binary = shutil.which("prometheus")
    if binary is None:
        skip_for_want_of("prometheus", "no prometheus is on the PATH")
        raise AssertionError
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
    config.write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": scrapes})
    )
    command = [
        binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "prometheus.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or _is_ready(port), "Prometheus is ready", _START_LIMIT_S)
        if process.poll() is not None:
            raise RuntimeError(f"Prometheus ended: {(folder / 'prometheus.log').read_text()[-2000:]}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _is_ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
