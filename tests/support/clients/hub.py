"""A stand-in for the Hugging Face Hub: one repository out of a folder, by the routes that a download takes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What it serves, and what was asked of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.paths: list[str] = []
        """Of all calls."""

    def find(self, path: str) -> tuple[bytes, str] | None:
        """Return the body and the kind of an answer; None for what is not there."""
        self.paths.append(path)
        files = sorted(each.name for each in self.folder.iterdir())
        if path.startswith(f"/api/models/{self.name}/revision/"):
            listed = {"id": self.name, "sha": COMMIT, "siblings": [{"rfilename": each} for each in files]}
            return json.dumps(listed).encode(), "application/json"
        if path == f"/api/models/{self.name}/tree/{COMMIT}":
            return json.dumps([self._entry(each) for each in files]).encode(), "application/json"
        revision, _, file = path.removeprefix(f"/{self.name}/resolve/").partition("/")
        if path.startswith(f"/{self.name}/resolve/") and revision == COMMIT and file in files:
            return (self.folder / file).read_bytes(), "application/octet-stream"
        return None

    def _entry(self, file: str) -> dict[str, object]:
        content = (self.folder / file).read_bytes()
        return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}  # noqa: S324


@contextmanager
def running_hub(name: str, folder: Path) -> Iterator[tuple[Hub, str]]:
    """Serve a folder as a repository; yield the hub and its base URL."""
    hub = Hub(name, folder)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            found = hub.find(self.path.partition("?")[0])
            body, kind = found or (b'{"error": "not found"}', "application/json")
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            if not found:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
