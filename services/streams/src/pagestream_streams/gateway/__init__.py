"""The gateway side: accept requests and read their logs."""

from pagestream_streams.gateway.log_quota import most_bytes
from pagestream_streams.gateway.session import GatewaySession

__all__ = ["GatewaySession", "most_bytes"]
