"""The command `pagestream-engine` on a machine that is not the leader of its group: it has no Redis and serves nothing.

It exits when the group ends: with 0 where the leader has ended it orderly, else with 1. What starts it anew, as
Kubernetes does, lets it join the group's next generation.
"""

import logging
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import EngineError, NodeError
from pagestream_engine.executor.nodes import follower
from pagestream_telemetry.environment import read_environment, variable_of
from pagestream_telemetry.logs import configure_logs
from pagestream_telemetry.settings import TelemetrySettings
from setproctitle import setproctitle

from pagestream_worker.settings import WORKER, build_parser, engine_config, logging_settings, worker_fields

logger = logging.getLogger("pagestream_worker")

EXIT_LOST, EXIT_BAD_OPTIONS = 1, 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TITLE = "pagestream-engine-node"


@dataclass(frozen=True)
class NodeSettings:
    """All settings of such a process."""

    model: str
    engine: EngineConfig
    telemetry: TelemetrySettings
    """For its logs."""


def node_settings(arguments: Sequence[str] | None, environ: Mapping[str, str]) -> NodeSettings | None:
    """Read the command line and the environment; None: this machine serves requests.

    Raises:
        EngineError: an engine option is out of range.
        ValueError: another option or a variable is malformed or missing; the message names it.
    """
    options = build_parser().parse_args(arguments)
    engine = engine_config(options, environ)
    if engine.parallel.node_rank == 0:
        return None
    given = read_environment(environ, {WORKER: worker_fields()})[WORKER]
    model = options.model or given.get("model")
    if not model:
        raise ValueError(f"MODEL is needed; give it, or set {variable_of(WORKER, 'model')}")
    return NodeSettings(model, engine, logging_settings(options, environ))


def run_node(settings: NodeSettings) -> int:
    """Compute what the leader plans until the group ends; return the exit code.

    SIGTERM ends it before it has joined. After that the leader ends it: a shutdown of all machines sends SIGTERM to all
    of them, and the group has to compute until the leader has handed its requests back.
    """
    setproctitle(TITLE)
    configure_logs(settings.telemetry)
    for number in _SIGNALS:
        signal.signal(number, _exit)  # the first process of a container has no default action
    try:
        reason = follower.run_node(settings.model, settings.engine, on_joined=_ignore_signals)
    except NodeError as error:
        logger.critical("ended: %s", error)
        return EXIT_LOST
    except EngineError as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    if reason:
        logger.critical("the group has ended: %s", reason)
        return EXIT_LOST
    logger.info("the leader has ended the group")
    return 0


def _exit(*_: object) -> None:
    sys.exit(0)


def _ignore_signals() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
