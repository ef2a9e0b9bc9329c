"""The `pagestream-gateway` process."""

import asyncio
import gc
import resource
import sys

import setproctitle
import uvloop
from pagestream_telemetry.logs import configure_logs

from pagestream_gateway.configuration import load_settings
from pagestream_gateway.errors import GatewayError, SettingsError
from pagestream_gateway.server import serve

_YOUNG_OBJECTS = 20_000  # between two collections; a few MB
_OPEN_FILES = 2**16
EXIT_BAD_OPTIONS = 2


def main() -> None:
    """Serve until SIGTERM or SIGINT.

    Exits with 2 where settings are wrong, with 1 where a port or Redis is not there.
    """
    setproctitle.setproctitle("pagestream-gateway")
    try:
        settings = load_settings()
        configure_logs(settings.telemetry, sets_traces=True)
        _tune_collector()
        _raise_file_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except SettingsError as error:
        print(f"pagestream-gateway: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(EXIT_BAD_OPTIONS)
    except GatewayError as error:
        sys.exit(f"pagestream-gateway: {error}")


def _tune_collector() -> None:
    """Exclude imported modules from garbage collection, and collect young objects less often.

    A stream makes few cycles, but thousands of short-lived objects a second.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def _raise_file_limit() -> None:
    """Let the process open more files, where it may: each connection is one, and many systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    main()
