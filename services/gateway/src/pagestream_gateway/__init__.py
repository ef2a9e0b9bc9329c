"""The gateway: gRPC and OpenAI HTTP in front of the durable token stream."""

from pagestream_gateway.errors import GatewayError, SettingsError, StartupError
from pagestream_gateway.lifecycle import Ports, running_gateway, serve
from pagestream_gateway.settings import Settings, load_settings

__all__ = [
    "GatewayError",
    "Ports",
    "Settings",
    "SettingsError",
    "StartupError",
    "load_settings",
    "running_gateway",
    "serve",
]
