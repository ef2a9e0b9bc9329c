"""`pagestream serve`: all parts on one machine.

Names are imported when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagestream_cli.serve.deployment import Deployment
    from pagestream_cli.serve.model import ModelChoice, choose_model, demo_model_places, find_demo_model
    from pagestream_cli.serve.options import PASSED_ON, ServeOptions, parse_options
    from pagestream_cli.serve.plan import (
        DrainStage,
        EngineLogs,
        GatewayPorts,
        Plan,
        PortPlan,
        assign_ports,
        check_parts,
        engine_environment,
        engine_name,
        engines_left_behind,
    )
    from pagestream_cli.serve.report import MAX_CHARS, RepeatedLines, Reporter, shorten
    from pagestream_cli.serve.vllm_flags import FLAGS, Idle, Refused, Taken

__all__ = [
    "FLAGS",
    "MAX_CHARS",
    "PASSED_ON",
    "Deployment",
    "DrainStage",
    "EngineLogs",
    "GatewayPorts",
    "Idle",
    "ModelChoice",
    "Plan",
    "PortPlan",
    "Refused",
    "RepeatedLines",
    "Reporter",
    "ServeOptions",
    "Taken",
    "assign_ports",
    "check_parts",
    "choose_model",
    "demo_model_places",
    "engine_environment",
    "engine_name",
    "engines_left_behind",
    "find_demo_model",
    "parse_options",
    "shorten",
]

_MODULES = {
    "Deployment": "deployment",
    **dict.fromkeys(("ModelChoice", "choose_model", "demo_model_places", "find_demo_model"), "model"),
    **dict.fromkeys(("PASSED_ON", "ServeOptions", "parse_options"), "options"),
    **dict.fromkeys(
        (
            "DrainStage",
            "EngineLogs",
            "GatewayPorts",
            "Plan",
            "PortPlan",
            "assign_ports",
            "check_parts",
            "engine_environment",
            "engine_name",
            "engines_left_behind",
        ),
        "plan",
    ),
    **dict.fromkeys(("MAX_CHARS", "RepeatedLines", "Reporter", "shorten"), "report"),
    **dict.fromkeys(("FLAGS", "Idle", "Refused", "Taken"), "vllm_flags"),
}
"""The module that defines each exported name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
