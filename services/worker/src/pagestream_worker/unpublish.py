"""The command `pagestream-unpublish`: remove models from Redis, without loading an engine."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence

from pagestream_streams import (
    Broker,
    ModelInUse,
    ModelNotFound,
    RequestsUnfinished,
    StreamsError,
    StreamsSettings,
    settings_from_environment,
    unpublish,
)
from pagestream_streams.limits import EndCounter

EXIT_REMOVED, EXIT_UNAVAILABLE, EXIT_BAD_OPTIONS, EXIT_IN_USE, EXIT_UNFINISHED = 0, 1, 2, 3, 4

_REDIS = "PAGESTREAM_WORKER__REDIS"
_EPILOG = """exit codes: 0 removed, or not published; 1 Redis doesn't answer; 2 wrong options;
3 engines serve a model; 4 unfinished requests, and no --end-requests. With 3 and 4 that model stays; with
--end-requests some of its requests may have ended. Repeat it after any error."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `pagestream-unpublish`."""
    parser = argparse.ArgumentParser(
        prog="pagestream-unpublish",
        description="Removes models that no engine serves any more. Repeat it after any error.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="a model, as clients ask for it")
    parser.add_argument("--redis", metavar="URL", help=f"default: {_REDIS}")
    parser.add_argument("--end-requests", action="store_true", help="end unfinished requests with an error")
    parser.add_argument("--wait", type=_seconds, default=0.0, metavar="SECONDS", help="for its engines to end")
    return parser


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the command; returns its exit code."""
    environ = os.environ if environ is None else environ
    options = build_parser().parse_args(arguments)
    url = options.redis or environ.get(_REDIS, "")
    try:
        if not url:
            raise ValueError(f"--redis is needed; give it, or set {_REDIS}")
        settings = settings_from_environment(environ)
        return asyncio.run(_unpublish(url, settings, options))
    except StreamsError as error:
        return _end(EXIT_UNAVAILABLE, str(error))
    except ValueError as error:
        return _end(EXIT_BAD_OPTIONS, str(error))


async def _unpublish(url: str, settings: StreamsSettings, options: argparse.Namespace) -> int:
    """Remove the models, one that stays no reason to keep the others; return the first exit code that isn't 0."""
    async with await Broker.connect(url, settings) as broker:
        until_s = time.monotonic() + options.wait  # for all engines together
        codes = [await _unpublish_one(broker, name, options, until_s) for name in options.names]
    return next((code for code in codes if code != EXIT_REMOVED), EXIT_REMOVED)


async def _unpublish_one(broker: Broker, name: str, options: argparse.Namespace, until_s: float) -> int:
    wait_s = max(0.0, until_s - time.monotonic())
    try:
        count = EndCounter(broker).count_partition
        ended = await unpublish(broker, name, end_requests=options.end_requests, wait_s=wait_s, count_ended=count)
    except ModelNotFound:
        return _end(EXIT_REMOVED, f"{name!r} is not published")
    except ModelInUse as error:
        return _end(EXIT_IN_USE, str(error))
    except RequestsUnfinished as error:
        return _end(EXIT_UNFINISHED, f"{error} with --end-requests")
    return _end(EXIT_REMOVED, f"{name!r} was removed; {ended} requests were ended")


def _end(code: int, text: str) -> int:
    print(f"pagestream-unpublish: {text}", file=sys.stderr)  # noqa: T201
    return code


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} was given, a number of seconds from 0 on is expected")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
