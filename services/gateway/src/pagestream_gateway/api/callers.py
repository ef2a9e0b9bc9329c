"""Who makes an HTTP call."""

from starlette.requests import Request
from starlette.types import Scope

from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.core.identities.identity import Credentials, Identity


async def identify(gateway: Gateway, request: Request) -> Identity:
    """Return who makes a call. Raises GatewayStopping or Unauthenticated."""
    return await gateway.identify(credentials_of(request))


def credentials_of(request: Request) -> Credentials:
    """Return what a call carries."""
    return Credentials(request.headers.get("authorization"), _certificate(request.scope))


def _certificate(scope: Scope) -> str | None:
    """Return the client's certificate as the TLS extension of ASGI has it."""
    chain = scope.get("extensions", {}).get("tls", {}).get("client_cert_chain", ())
    return next(iter(chain), None)
