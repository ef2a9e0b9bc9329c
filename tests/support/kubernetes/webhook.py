"""A mutating webhook of somebody else's, over TLS, as an API server calls it."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.kubernetes.api import kube_binary

Patch = list[dict[str, Any]]
"""Operations of JSON Patch."""


class Webhook:
    """Used as `with Webhook(folder, change) as webhook`."""

    def __init__(self, folder: Path, change: Callable[[dict[str, Any]], Patch], host: str = "127.0.0.1") -> None:
        """`change` returns what to change in an object; the API server reaches it at `host`."""
        self._folder, self._change, self._host = folder, change, host
        self.calls = 0

    def __enter__(self) -> Self:
        """Listen on a port of loopback, with a new certificate."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._certificate, key = self._folder / "webhook.crt", self._folder / "webhook.key"
        made = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=webhook", "-days", "1")
        names = ("-addext", f"subjectAltName=IP:{self._host}", "-out", self._certificate, "-keyout", key)
        subprocess.run([kube_binary("openssl"), *made, *names], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate, key)
        self._server = ThreadingHTTPServer((self._host, 0), _handler(self))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="webhook")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def configuration(self, name: str, namespace: str, *rules: tuple[str, str]) -> dict[str, Any]:
        """A MutatingWebhookConfiguration for a namespace. `rules`: API group and plural of what it changes."""
        authority = base64.b64encode(self._certificate.read_bytes()).decode()
        return {
            "metadata": {"name": name},
            "webhooks": [
                {
                    "name": f"{name}.example.com",
                    "clientConfig": {
                        "url": f"https://{self._host}:{self._server.server_address[1]}/",
                        "caBundle": authority,
                    },
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                    "rules": [
                        {"apiGroups": [group], "apiVersions": ["*"], "resources": [plural], "operations": ["*"]}
                        for group, plural in rules
                    ],
                    "sideEffects": "None",
                    "admissionReviewVersions": ["v1"],
                    "failurePolicy": "Fail",
                }
            ],
        }

    def answer(self, review: dict[str, Any]) -> dict[str, Any]:
        """The AdmissionReview that allows a request, with the change."""
        self.calls += 1
        request = review["request"]
        patch = self._change(request["object"]) if request.get("object") else []
        response = {"uid": request["uid"], "allowed": True}
        if patch:
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
        return {"apiVersion": review["apiVersion"], "kind": "AdmissionReview", "response": response}


def _handler(webhook: Webhook) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = json.dumps(webhook.answer(review)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_request(self, *_: Any) -> None:
            pass

    return Handler
