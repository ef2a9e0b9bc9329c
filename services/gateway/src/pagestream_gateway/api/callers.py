"""Who makes an HTTP call."""

from starlette.requests import Request

from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.core.identities.identity import Credentials, Identity


async def identify(gateway: Gateway, request: Request) -> Identity:
    """Return who makes a call. Raises GatewayStopping or Unauthenticated."""
    return await gateway.identify(Credentials(request.headers.get("authorization")))
