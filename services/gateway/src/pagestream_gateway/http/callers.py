"""What stands before the routes: who calls and from where, spellings that clients differ in, and turns of requests.

`Front` is what each call passes. The routes read credentials (`identify`). `CorsHeaders` has the web pages that may
call from a browser.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pagestream_streams.tasks import Turns
from pagestream_telemetry import is_loopback
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagestream_gateway.auth.identity import Credentials, Identity
from pagestream_gateway.error_codes import HEADERS
from pagestream_gateway.errors import HostNotAllowed, OriginNotAllowed
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import HEADER as WARNINGS
from pagestream_gateway.http.body import RequestWarnings, collecting
from pagestream_gateway.openai.errors import error_response
from pagestream_gateway.settings import LOCALHOST, GatewaySettings

_ASKED = "asked"
"""Code in the audit log of an administrator's call whose outcome is not noted."""


async def identify(gateway: Gateway, request: Request) -> Identity:
    """Return who makes a call. Raises GatewayStopping, Unauthenticated, WrongCredential, CredentialsUnavailable."""
    return await gateway.identify(credentials_of(request))


async def check_operator(gateway: Gateway, request: Request, *, is_open: bool) -> None:
    """Raise as `identify` unless an administrator calls, or anybody who may call where `is_open` is set."""
    credentials = credentials_of(request)
    if is_open and gateway.authenticator.find_administrator(credentials) is None:
        await gateway.identify(credentials)
        return
    administrator = await gateway.identify_administrator(credentials)
    gateway.audit.administered(administrator, request.method, request.scope["path"], _ASKED)


def credentials_of(request: Request) -> Credentials:
    """Return what a call carries."""
    peer = "" if request.client is None else request.client.host
    return Credentials(request.headers.get("authorization"), _certificate(request.scope), peer)


def _certificate(scope: Scope) -> str | None:
    """Return the client's certificate as the TLS extension of ASGI has it."""
    chain = scope.get("extensions", {}).get("tls", {}).get("client_cert_chain", ())
    return next(iter(chain), None)


_LOCAL_ORIGIN = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?"
_READABLE = [
    "X-Request-Id",
    "request-id",
    "X-Request-Seed",
    "X-Client-Request-Id",
    "X-Queue-Position",
    "X-Expected-Wait-Ms",
    "X-Stream-Verified",
    WARNINGS,
    "Retry-After",
    "retry-after-ms",
    *HEADERS,
]
_KEPT_S = 600


class _Rule(TypedDict):
    """Arguments of CORSMiddleware."""

    allow_origins: list[str]
    allow_origin_regex: str | None
    allow_methods: list[str]
    allow_headers: list[str]
    expose_headers: list[str]
    max_age: int


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of these origins call the API: https://app.example.com, LOCALHOST, or * for every page."""
    if origins:
        app.add_middleware(CORSMiddleware, **_rule(origins))


class CorsHeaders:
    """The rule of web pages that may call, and the headers that let a page read an answer without the application."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._rule = CORSMiddleware(_no_application, **_rule(origins)) if origins else None

    def allows(self, origin: str) -> bool:
        """Return whether pages of this origin may call the API."""
        return self._rule is not None and (self._rule.allow_all_origins or self._rule.is_allowed_origin(origin))

    def of(self, origin: str | None) -> Mapping[str, str]:
        """Return the headers of an answer to a request with this Origin; None where it has none."""
        if self._rule is None:
            return {}
        headers = MutableHeaders({} if origin is None else self._rule.simple_headers)
        if origin is None or self._rule.allow_all_origins or not self._rule.is_allowed_origin(origin):
            headers["Vary"] = "Origin"
        else:
            self._rule.allow_explicit_origin(headers, origin)
        return headers


def _rule(origins: Sequence[str]) -> _Rule:
    return {
        "allow_origins": [each for each in origins if each != LOCALHOST],
        "allow_origin_regex": _LOCAL_ORIGIN if LOCALHOST in origins else None,
        "allow_methods": ["GET", "HEAD", "POST", "PUT", "DELETE"],
        "allow_headers": ["*"],
        "expose_headers": _READABLE,
        "max_age": _KEPT_S,
    }


async def _no_application(scope: Scope, receive: Receive, send: Send) -> None:
    raise NotImplementedError


_ANY = "*"


def own_hosts(settings: GatewaySettings, address: str, *, asks_for_credentials: bool) -> Sequence[str] | None:
    """Return the names beside this machine's own that a Host header may have; None: any.

    They are limited where the address is loopback and no credential is asked for.
    """
    if asks_for_credentials or not is_loopback(address) or _ANY in settings.hosts:
        return None
    return [address, *settings.hosts]


class Front:
    """ASGI middleware: what each HTTP call passes before the routes, in the order of `__call__`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        ignores_unknown: bool,
        hosts: Sequence[str] | None,
        cors: CorsHeaders | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Create it.

        Args:
            app: the routes.
            ignores_unknown: see RequestWarnings.
            hosts: see `own_hosts`.
            cors: of web pages that may change something; None where pages are not told apart.
            turns: of POSTs; None where they don't wait, as on ports of probes and administrators.
        """
        self._app = app
        self._ignores_unknown = ignores_unknown
        self._hosts = None if hosts is None else {each.lower() for each in hosts}
        self._cors = cors
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for a turn, refuse foreign pages and hosts, take other spellings, and collect the body's warnings."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._turns is not None and scope["method"] == "POST":
            await self._turns.wait()
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        path = scope["path"]
        if path != "/" and path.endswith("/"):
            scope = {**scope, "path": path.rstrip("/") or "/"}
        scope = _with_authorization(scope)
        warnings = RequestWarnings(ignores_unknown=self._ignores_unknown)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start" and (text := warnings.header):
                MutableHeaders(scope=message)[WARNINGS] = text
            await send(message)

        with collecting(warnings):
            if scope["method"] != "HEAD":
                await self._app(scope, receive, answer)
                return
            alone = _HeadersAlone(receive, answer)
            await self._app({**scope, "method": "GET"}, alone.receive, alone.send)

    def _refusal(self, scope: Scope) -> HostNotAllowed | OriginNotAllowed | None:
        """Return why a call may not be made: by its Origin, or by its Host.

        A browser sends forms, and bodies of a form's types, for any page and asks nobody before: CORS only keeps the
        answer from it. It sends them with a client's certificate, and to servers of its own machine; with a key it asks
        before. So a page of another origin may change nothing without a key.
        """
        if self._cors is not None and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            headers = Headers(scope=scope)
            origin = headers.get("origin", "")
            is_own = origin.partition("://")[2].lower() == headers.get("host", "").lower()
            has_key = "authorization" in headers or "x-api-key" in headers
            if origin and not is_own and not has_key and not self._cors.allows(origin):
                return OriginNotAllowed(origin)
        if self._hosts is not None:
            for name, value in scope["headers"]:
                if name != b"host":
                    continue
                host = _without_port(value.decode("latin-1"))
                if host not in self._hosts and not is_loopback(host):
                    return HostNotAllowed(host)
        return None


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    has_port = bool(colon) and (not port or port.isdecimal()) and (":" not in name or name.endswith("]"))
    return (name if has_port else host).lower().removesuffix(".")


def _with_authorization(scope: Scope) -> Scope:
    """Return a call with `x-api-key` as its Authorization, where it has none."""
    headers = dict(scope["headers"])
    if b"x-api-key" not in headers or b"authorization" in headers:
        return scope
    return {**scope, "headers": [*scope["headers"], (b"authorization", b"Bearer " + headers[b"x-api-key"])]}


class _HeadersAlone:
    """Sends the headers of an answer, and is a client that leaves then: a stream ends there."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._is_complete = False

    async def receive(self) -> Message:
        return {"type": "http.disconnect"} if self._is_complete else await self._receive()

    async def send(self, message: Message) -> None:
        if self._is_complete:
            return
        await self._send(message)
        if message["type"] == "http.response.start":
            self._is_complete = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
