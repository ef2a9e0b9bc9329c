"""The Kubernetes operator of Pagestream."""

from pagestream_operator.errors import (
    ApiFailure,
    ApiUnavailable,
    Blocked,
    Conflict,
    Gone,
    NotLeading,
    OperatorError,
    PoolInvalid,
    Rejected,
    SettingsError,
    SinkFileInvalid,
    SinkUnavailable,
    SourceUnavailable,
)
from pagestream_operator.settings import EngineDefaults, OperatorVariables, Settings, load_settings

__all__ = [
    "ApiFailure",
    "ApiUnavailable",
    "Blocked",
    "Conflict",
    "EngineDefaults",
    "Gone",
    "NotLeading",
    "OperatorError",
    "OperatorVariables",
    "PoolInvalid",
    "Rejected",
    "Settings",
    "SettingsError",
    "SinkFileInvalid",
    "SinkUnavailable",
    "SourceUnavailable",
    "load_settings",
]
