"""The worker: runs the offline engine on requests from the durable token stream.

Names are imported when they are used: the commands of jobs are started without an engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_worker.card import build_card
    from pagestream_worker.gauges import EngineGauges, EngineReaders
    from pagestream_worker.health import EXIT_STALLED, Health
    from pagestream_worker.pool_adapters import MOST_RESULT_BYTES
    from pagestream_worker.serving.degradation import HostShare
    from pagestream_worker.serving.outputs import EngineFailed
    from pagestream_worker.settings import ProcessSettings, WorkerSettings, build_parser, engine_config, load_settings
    from pagestream_worker.telemetry import WorkerTelemetry
    from pagestream_worker.worker import Worker

__all__ = [
    "EXIT_STALLED",
    "MOST_RESULT_BYTES",
    "EngineFailed",
    "EngineGauges",
    "EngineReaders",
    "Health",
    "HostShare",
    "ProcessSettings",
    "Worker",
    "WorkerSettings",
    "WorkerTelemetry",
    "build_card",
    "build_parser",
    "engine_config",
    "load_settings",
]

_MODULES = {
    "build_card": "card",
    **dict.fromkeys(("EngineGauges", "EngineReaders"), "gauges"),
    **dict.fromkeys(("EXIT_STALLED", "Health"), "health"),
    "MOST_RESULT_BYTES": "pool_adapters",
    "HostShare": "serving.degradation",
    "EngineFailed": "serving.outputs",
    **dict.fromkeys(
        ("ProcessSettings", "WorkerSettings", "build_parser", "engine_config", "load_settings"), "settings"
    ),
    "WorkerTelemetry": "telemetry",
    "Worker": "worker",
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
