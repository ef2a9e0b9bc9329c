"""The `pagestream-gateway` process."""

import asyncio
import gc
import sys

import setproctitle
import uvloop
from pagestream_telemetry.logs import configure_logs

from pagestream_gateway.errors import GatewayError, SettingsError
from pagestream_gateway.lifecycle import serve
from pagestream_gateway.settings import load_settings

_YOUNG_OBJECTS = 20_000  # between two collections; a few MB
EXIT_BAD_OPTIONS = 2


def main() -> None:
    """Serve until SIGTERM or SIGINT.

    Exits with 2 where settings are wrong, with 1 where a port or Redis is not there.
    """
    setproctitle.setproctitle("pagestream-gateway")
    try:
        settings = load_settings()
        configure_logs(settings.telemetry)
        _tune_collector()
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


if __name__ == "__main__":
    main()
