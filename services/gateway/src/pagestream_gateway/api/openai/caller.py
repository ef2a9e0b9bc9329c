"""The beginning of every call: is the gateway open, and who is calling."""

from starlette.requests import Request

from pagestream_gateway.core.auth import KeyRing
from pagestream_gateway.core.frontend import Frontend
from pagestream_gateway.errors import GatewayStopping


class Door:
    """Lets callers in by their API key."""

    def __init__(self, frontend: Frontend, keys: KeyRing) -> None:
        self._frontend = frontend
        self._keys = keys

    def enter(self, request: Request) -> str:
        """The caller's tenant. Raises GatewayStopping or Unauthenticated."""
        if self._frontend.streams.is_stopping:
            raise GatewayStopping
        return self._keys.tenant(request.headers.get("authorization"))
