"""The gateway: gRPC and OpenAI HTTP in front of the durable token stream.

Names are imported when they are used: the settings are read without the servers' libraries.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_gateway.configuration import load_settings
    from pagestream_gateway.errors import GatewayError, SettingsError, StartupError
    from pagestream_gateway.server import Ports, running_gateway, serve
    from pagestream_gateway.settings import (
        AuditSettings,
        BatchSettings,
        ClassSettings,
        ConnectionSettings,
        GatewaySettings,
        LimitSettings,
        Settings,
        ShutdownSettings,
        StreamSettings,
    )

__all__ = [
    "AuditSettings",
    "BatchSettings",
    "ClassSettings",
    "ConnectionSettings",
    "GatewayError",
    "GatewaySettings",
    "LimitSettings",
    "Ports",
    "Settings",
    "SettingsError",
    "ShutdownSettings",
    "StartupError",
    "StreamSettings",
    "load_settings",
    "running_gateway",
    "serve",
]

_MODULES = {
    **dict.fromkeys(("GatewayError", "SettingsError", "StartupError"), "errors"),
    **dict.fromkeys(("Ports", "running_gateway", "serve"), "server"),
    **dict.fromkeys(
        (
            "AuditSettings",
            "BatchSettings",
            "ClassSettings",
            "ConnectionSettings",
            "GatewaySettings",
            "LimitSettings",
            "Settings",
            "ShutdownSettings",
            "StreamSettings",
        ),
        "settings",
    ),
    "load_settings": "configuration",
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
