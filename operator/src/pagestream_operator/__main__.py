"""`pagestream-operator`: run one replica of the operator, or one of the chart's commands."""

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence

from pagestream_telemetry.errors import TelemetryError
from pagestream_telemetry.logs import configure_logs
from pagestream_telemetry.settings import TelemetrySettings, telemetry_settings

from pagestream_operator.app import App
from pagestream_operator.commands import apply_crd, delete_pools, release_pools
from pagestream_operator.errors import OperatorError
from pagestream_operator.settings import Settings, load_settings

EXIT_FAILED = 1
EXIT_BAD_OPTIONS = 2
_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "apply-crd": apply_crd,
    "delete-pools": delete_pools,
    "release-pools": release_pools,
}
_USAGE = (
    "usage: pagestream-operator [apply-crd | delete-pools | release-pools ...]; without a command it runs the "
    "operator, whose settings are environment variables, PAGESTREAM_OPERATOR__<FIELD>"
)
_KOPF_LEVELS = {"kopf": logging.WARNING, "kopf._core.reactor.running": logging.ERROR}
"""A line for each watch adds nothing to the metrics, and kopf warns that it doesn't handle signals: `_run` does."""
_KOPF_FIELDS = ("settings", "k8s_skip", "k8s_ref")
"""Attributes of kopf's log records that aren't text."""


async def _run(settings: Settings, telemetry: TelemetrySettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        stop.set()
        # If the shutdown hangs, end the process: another replica leads when the lease lapses.
        timer = threading.Timer(settings.variables.shutdown_s, os._exit, [EXIT_FAILED])
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    await App(settings, telemetry, os.environ).run(stop)


def _quiet_kopf() -> None:
    """Keep kopf's log records to text and to what has gone wrong. Call it after logs were configured."""
    for name, level in _KOPF_LEVELS.items():
        logging.getLogger(name).setLevel(level)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_strip_kopf_fields)


def _strip_kopf_fields(record: logging.LogRecord) -> bool:
    for name in _KOPF_FIELDS:
        record.__dict__.pop(name, None)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in _COMMANDS:
        _COMMANDS[given[0]](given[1:])
        return 0
    if given:
        print(_USAGE, file=sys.stderr)  # noqa: T201
        return 0 if list(given) in (["--help"], ["-h"]) else EXIT_BAD_OPTIONS
    try:
        settings, telemetry = load_settings(os.environ), telemetry_settings(os.environ)
    except (OperatorError, TelemetryError) as error:
        print(f"pagestream-operator: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    configure_logs(telemetry)
    _quiet_kopf()
    try:
        asyncio.run(_run(settings, telemetry))
    except (OperatorError, TelemetryError) as error:
        print(f"pagestream-operator: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_BAD_OPTIONS
    return 0


if __name__ == "__main__":
    sys.exit(main())
