"""The command `pagestream-engine`: settings, exit codes, and the event loop of one engine process.

On a machine that is not the leader of its group it has no Redis and serves nothing (`run_node`). It exits when the
group ends: with 0 where the leader has ended it orderly, else with 1. What starts it anew, as Kubernetes does, lets it
join the group's next generation.
"""

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import uvloop
from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import EngineError, NodeError
from pagestream_engine.executor.nodes import follower
from pagestream_engine.wire.worker import ENGINE
from pagestream_streams import StreamsSettings
from pagestream_streams.connection.topologies import open_topology
from pagestream_streams.errors import StreamsError
from pagestream_telemetry.environment import read_environment, variable_of
from pagestream_telemetry.errors import EndpointError
from pagestream_telemetry.logs import configure_logs
from pagestream_telemetry.settings import TelemetrySettings
from setproctitle import setproctitle

from pagestream_worker.card import ModelCardError
from pagestream_worker.engine_core import EngineCoreError
from pagestream_worker.process import run_process
from pagestream_worker.requests import EngineFailed
from pagestream_worker.serving_models import EXIT_FAILED
from pagestream_worker.settings import (
    WORKER,
    build_parser,
    engine_config,
    load_settings,
    logging_settings,
    worker_fields,
)

logger = logging.getLogger("pagestream_worker")

EXIT_BAD_OPTIONS = 2


def check_address(url: str) -> None:
    """Raise a ValueError that names the option where a Redis address is malformed."""
    try:
        open_topology(url, StreamsSettings())
    except ValueError as error:
        raise ValueError(f"--redis: {error}") from error


def main(arguments: Sequence[str] | None = None, make_engine: str = ENGINE) -> int:
    """Run the command; returns its exit code."""
    try:
        node = node_settings(arguments, os.environ)
        if node is not None:
            return run_node(node)
        settings = load_settings(arguments, os.environ)
        check_address(settings.worker.redis_url)
    except (EngineError, ValueError) as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    setproctitle("pagestream-engine")
    configure_logs(settings.telemetry)
    try:
        uvloop.run(run_process(settings, make_engine))
    except (EngineError, ModelCardError, EndpointError) as error:
        print(f"pagestream-engine: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    except (EngineFailed, EngineCoreError, StreamsError) as error:
        logger.critical("ended: %s", error)
        return EXIT_FAILED
    return 0


EXIT_LOST = 1
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


if __name__ == "__main__":
    sys.exit(main())
