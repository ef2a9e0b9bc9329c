"""The worker: runs the offline engine on requests from the durable token stream.

Names are imported when they are used: the commands of jobs are started without an engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_worker.card import build_card
    from pagestream_worker.claim_budget import UNLIMITED_TOKENS, ClaimBudget
    from pagestream_worker.core_process import STEPS_AHEAD, TITLE, PlainSequences
    from pagestream_worker.engine_core import EngineCore, EngineCoreError, EngineProcess, EngineThread, is_link_lost
    from pagestream_worker.jobs import MOST_RESULT_BYTES
    from pagestream_worker.load_shedding import (
        BETWEEN_MARKS,
        TOP,
        BatchLimit,
        DegradationSettings,
        Effects,
        HostShare,
        Ladder,
        Ladders,
        Pace,
        Resource,
        Rung,
        Rungs,
        Shares,
        Watermarks,
        degradation_settings,
        effects_at,
        host_share,
    )
    from pagestream_worker.logs.library import load_library
    from pagestream_worker.logs.token_logs import (
        PACKED_ENTRIES,
        NativeLog,
        NativeLogError,
        NativeLogs,
        PendingLogs,
        PythonLog,
        PythonLogs,
        TokenLog,
        TokenLogs,
        open_logs,
    )
    from pagestream_worker.model_sharing import (
        FIRST_DELAY_S,
        MOST_DELAY_S,
        Change,
        Demand,
        Duties,
        EngineState,
        EngineStuckError,
        Failures,
        Loader,
        LoadTimeoutError,
        SharingLimits,
        Turns,
        plan_changes,
        read_duties,
    )
    from pagestream_worker.process import Cores, main
    from pagestream_worker.requests import (
        PART_BYTES,
        ActiveRequests,
        EngineFailed,
        RunningRequest,
        child_of,
        sampling_of,
        sampling_of_child,
    )
    from pagestream_worker.settings import ProcessSettings, WorkerSettings, build_parser, engine_config, load_settings
    from pagestream_worker.telemetry import EngineGauges, EngineReaders, WorkerTelemetry
    from pagestream_worker.watchdog import EXIT_STALLED, Health
    from pagestream_worker.worker import Worker

__all__ = [
    "BETWEEN_MARKS",
    "EXIT_STALLED",
    "FIRST_DELAY_S",
    "MOST_DELAY_S",
    "MOST_RESULT_BYTES",
    "PACKED_ENTRIES",
    "PART_BYTES",
    "STEPS_AHEAD",
    "TITLE",
    "TOP",
    "UNLIMITED_TOKENS",
    "ActiveRequests",
    "BatchLimit",
    "Change",
    "ClaimBudget",
    "Cores",
    "DegradationSettings",
    "Demand",
    "Duties",
    "Effects",
    "EngineCore",
    "EngineCoreError",
    "EngineFailed",
    "EngineGauges",
    "EngineProcess",
    "EngineReaders",
    "EngineState",
    "EngineStuckError",
    "EngineThread",
    "Failures",
    "Health",
    "HostShare",
    "Ladder",
    "Ladders",
    "LoadTimeoutError",
    "Loader",
    "NativeLog",
    "NativeLogError",
    "NativeLogs",
    "Pace",
    "PendingLogs",
    "PlainSequences",
    "ProcessSettings",
    "PythonLog",
    "PythonLogs",
    "Resource",
    "Rung",
    "Rungs",
    "RunningRequest",
    "Shares",
    "SharingLimits",
    "TokenLog",
    "TokenLogs",
    "Turns",
    "Watermarks",
    "Worker",
    "WorkerSettings",
    "WorkerTelemetry",
    "build_card",
    "build_parser",
    "child_of",
    "degradation_settings",
    "effects_at",
    "engine_config",
    "host_share",
    "is_link_lost",
    "load_library",
    "load_settings",
    "main",
    "open_logs",
    "plan_changes",
    "read_duties",
    "sampling_of",
    "sampling_of_child",
]

_MODULES = {
    **dict.fromkeys(("ActiveRequests", "EngineFailed"), "requests"),
    "build_card": "card",
    **dict.fromkeys(("ClaimBudget", "UNLIMITED_TOKENS"), "claim_budget"),
    "TITLE": "core_process",
    **dict.fromkeys(("EngineCore", "EngineCoreError", "EngineProcess", "EngineThread", "is_link_lost"), "engine_core"),
    **dict.fromkeys(("EngineGauges", "EngineReaders"), "telemetry"),
    **dict.fromkeys(("EXIT_STALLED", "Health"), "watchdog"),
    **dict.fromkeys(
        (
            "BETWEEN_MARKS",
            "BatchLimit",
            "DegradationSettings",
            "Effects",
            "HostShare",
            "Ladder",
            "Ladders",
            "Pace",
            "Resource",
            "Rung",
            "Rungs",
            "Shares",
            "TOP",
            "Watermarks",
            "degradation_settings",
            "effects_at",
            "host_share",
        ),
        "load_shedding",
    ),
    "load_library": "logs.library",
    **dict.fromkeys(("NativeLog", "NativeLogError", "NativeLogs", "open_logs"), "logs.token_logs"),
    **dict.fromkeys(
        ("PACKED_ENTRIES", "PendingLogs", "PythonLog", "PythonLogs", "TokenLog", "TokenLogs"), "logs.token_logs"
    ),
    **dict.fromkeys(
        (
            "Change",
            "Demand",
            "Duties",
            "EngineState",
            "FIRST_DELAY_S",
            "Failures",
            "MOST_DELAY_S",
            "SharingLimits",
            "Turns",
            "plan_changes",
            "read_duties",
        ),
        "model_sharing",
    ),
    "MOST_RESULT_BYTES": "jobs",
    **dict.fromkeys(("PART_BYTES", "child_of", "sampling_of", "sampling_of_child"), "requests"),
    "RunningRequest": "requests",
    **dict.fromkeys(("EngineStuckError", "LoadTimeoutError", "Loader"), "model_sharing"),
    **dict.fromkeys(
        ("ProcessSettings", "WorkerSettings", "build_parser", "engine_config", "load_settings"), "settings"
    ),
    **dict.fromkeys(("PlainSequences", "STEPS_AHEAD"), "core_process"),
    "WorkerTelemetry": "telemetry",
    "Worker": "worker",
    **dict.fromkeys(("Cores", "main"), "process"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
