"""The command `pagestream-engine`: settings, exit codes, and the event loop of one engine process."""

import logging
import os
import sys
from collections.abc import Sequence

import uvloop
from pagestream_engine.engine import Engine
from pagestream_engine.errors import EngineError
from pagestream_streams import StreamsSettings
from pagestream_streams.connection.topologies import open_topology
from pagestream_streams.errors import StreamsError
from pagestream_telemetry.errors import EndpointError
from pagestream_telemetry.logs import configure_logs
from setproctitle import setproctitle

from pagestream_worker.card import ModelCardError
from pagestream_worker.core_process import EngineFactory
from pagestream_worker.engine_core import EngineCoreError
from pagestream_worker.node import node_settings, run_node
from pagestream_worker.process import run_process
from pagestream_worker.serving_models import EXIT_FAILED
from pagestream_worker.settings import load_settings
from pagestream_worker.worker import EngineFailed

logger = logging.getLogger("pagestream_worker")

EXIT_BAD_OPTIONS = 2


def check_address(url: str) -> None:
    """Raise a ValueError that names the option where a Redis address is malformed."""
    try:
        open_topology(url, StreamsSettings())
    except ValueError as error:
        raise ValueError(f"--redis: {error}") from error


def main(arguments: Sequence[str] | None = None, make_engine: EngineFactory = Engine) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
