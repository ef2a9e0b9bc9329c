"""Who makes an HTTP call."""

from pagestream_telemetry import unmapped
from starlette.requests import Request
from starlette.types import Scope

from pagestream_gateway.auth.identity import Credentials, Identity
from pagestream_gateway.gateway import Gateway

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
    peer = "" if request.client is None else unmapped(request.client.host)
    return Credentials(request.headers.get("authorization"), _certificate(request.scope), peer)


def _certificate(scope: Scope) -> str | None:
    """Return the client's certificate as the TLS extension of ASGI has it."""
    chain = scope.get("extensions", {}).get("tls", {}).get("client_cert_chain", ())
    return next(iter(chain), None)
