"""The gateway side: accept requests and read their logs."""

from pagestream_streams.gateway.accept import most_bytes
from pagestream_streams.gateway.session import GatewaySession

__all__ = ["GatewaySession", "most_bytes"]
