"""An issuer of JSON Web Tokens: keys of its own, and a real HTTP server for their public halves."""

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

ISSUER = "https://issuer.test"
AUDIENCE = "inference"


@cache
def private_key(algorithm: str, number: int = 0) -> Any:
    """Return a key for an algorithm, the same for the same number."""
    if algorithm.startswith("ES"):
        return ec.generate_private_key({"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1()}[algorithm])
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


@dataclass
class Signer:
    """One key of an issuer."""

    kid: str = "one"
    algorithm: str = "RS256"
    number: int = 0

    def jwk(self, **more: Any) -> dict[str, Any]:
        """Return the public key as a member of a key set."""
        public = private_key(self.algorithm, self.number).public_key()
        kind: Any = RSAAlgorithm
        if self.algorithm.startswith("ES"):
            kind = ECAlgorithm
        elif self.algorithm == "EdDSA":
            kind = OKPAlgorithm
        return {**kind.to_jwk(public, as_dict=True), "kid": self.kid, "use": "sig", **more}

    def token(self, headers: dict[str, Any] | None = None, **claims: Any) -> str:
        """Return a signed token that is good for a minute; a claim that is None is left out."""
        given = {"iss": ISSUER, "aud": AUDIENCE, "sub": "u1", "exp": int(time.time()) + 60, "tenant": "a", **claims}
        given = {name: value for name, value in given.items() if value is not None}
        key = private_key(self.algorithm, self.number)
        return jwt.encode(given, key, self.algorithm, headers={"kid": self.kid, **(headers or {})})


def forged(header: dict[str, Any], claims: dict[str, Any], sign: Callable[[bytes], bytes] = lambda _: b"") -> str:
    """Return a token made by hand, with any header and signature."""
    parts = [_base64(json.dumps(part).encode()) for part in (header, claims)]
    return ".".join([*parts, _base64(sign(".".join(parts).encode()))])


def key_set(*signers: Signer) -> bytes:
    """Return the key set of some keys."""
    return json.dumps({"keys": [each.jwk() for each in signers]}).encode()


@dataclass
class KeyServer:
    """What the server answers, and how often it was asked."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    port: int = 0
    num_fetches: int = 0
    num_sent: int = 0
    """Bytes of bodies that its clients took."""

    @property
    def url(self) -> str:
        """The address of the set."""
        return f"http://127.0.0.1:{self.port}/keys"


@contextmanager
def running_key_server(*signers: Signer) -> Iterator[KeyServer]:
    """Serve a key set on the loopback address."""
    state = KeyServer(key_set(*signers))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.num_fetches += 1
            self.send_response(state.status)
            for name, value in {"Content-Length": str(len(state.body)), **state.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for start in range(0, len(state.body), 2**16):
                    state.num_sent += self.wfile.write(state.body[start : start + 2**16])
            except OSError:
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield state
        finally:
            server.shutdown()
            thread.join()


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
