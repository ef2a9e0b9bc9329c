"""The `pagestream-gateway` process."""

import asyncio
import sys

import setproctitle
import uvloop

from pagestream_gateway.errors import GatewayError
from pagestream_gateway.lifecycle import serve
from pagestream_gateway.logs import configure_logs
from pagestream_gateway.settings import load_settings


def main() -> None:
    """Serves until SIGTERM or SIGINT. Exits with 1 where settings are wrong or what it needs to start is not there."""
    setproctitle.setproctitle("pagestream-gateway")
    try:
        settings = load_settings()
        configure_logs(settings.log.level)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings))
    except GatewayError as error:
        sys.exit(f"pagestream-gateway: {error}")


if __name__ == "__main__":
    main()
