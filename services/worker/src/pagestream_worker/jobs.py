"""The commands of Kubernetes Jobs, which change models and adapters in Redis without an engine.

`pagestream-unpublish` removes models; `pagestream-adapters` loads the LoRA adapters of a pool's spec, and unloads those
that have left it.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagestream.v1.records_pb2 import Adapter
from pagestream_streams import (
    AdapterRefused,
    Broker,
    ModelInUse,
    ModelNotFound,
    RequestsUnfinished,
    StreamsError,
    StreamsSettings,
    settings_from_environment,
    unpublish,
)
from pagestream_streams.admin.adapters import adapter_revision
from pagestream_streams.limits import EndCounter

EXIT_DONE, EXIT_UNAVAILABLE, EXIT_BAD_OPTIONS, EXIT_IN_USE, EXIT_UNFINISHED = 0, 1, 2, 3, 4
MOST_RESULT_BYTES = 4096
"""Of the message that a container leaves to Kubernetes."""
UNPUBLISH, ADAPTERS = "pagestream-unpublish", "pagestream-adapters"

_REDIS = "PAGESTREAM_WORKER__REDIS"
_REVISION_DIGITS = 32


# -- pagestream-unpublish --

_UNPUBLISH_EPILOG = """exit codes: 0 removed, or not published; 1 Redis doesn't answer; 2 wrong options;
3 engines serve a model; 4 unfinished requests, and no --end-requests. With 3 and 4 that model stays; with
--end-requests some of its requests may have ended. Repeat it after any error."""


def run_unpublish(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run `pagestream-unpublish`; returns its exit code."""
    parser = _parser(UNPUBLISH, "Removes models that no engine serves any more. Repeat it after any error.")
    parser.epilog = _UNPUBLISH_EPILOG
    parser.add_argument("names", nargs="+", metavar="NAME", help="a model, as clients ask for it")
    parser.add_argument("--redis", metavar="URL", help=f"default: {_REDIS}")
    parser.add_argument("--end-requests", action="store_true", help="end unfinished requests with an error")
    parser.add_argument("--wait", type=_seconds, default=0.0, metavar="SECONDS", help="for its engines to end")
    options = parser.parse_args(arguments)
    try:
        return asyncio.run(_unpublish(*_redis_of(options, environ), options))
    except StreamsError as error:
        return _say(UNPUBLISH, EXIT_UNAVAILABLE, str(error))
    except ValueError as error:
        return _say(UNPUBLISH, EXIT_BAD_OPTIONS, str(error))


async def _unpublish(url: str, settings: StreamsSettings, options: argparse.Namespace) -> int:
    """Remove the models, one that stays no reason to keep the others; return the first exit code that isn't 0."""
    async with await Broker.connect(url, settings) as broker:
        until_s = time.monotonic() + options.wait  # for all engines together
        codes = [await _unpublish_one(broker, name, options, until_s) for name in options.names]
    return next((code for code in codes if code != EXIT_DONE), EXIT_DONE)


async def _unpublish_one(broker: Broker, name: str, options: argparse.Namespace, until_s: float) -> int:
    wait_s = max(0.0, until_s - time.monotonic())
    try:
        count = EndCounter(broker).count_partition
        ended = await unpublish(broker, name, end_requests=options.end_requests, wait_s=wait_s, count_ended=count)
    except ModelNotFound:
        return _say(UNPUBLISH, EXIT_DONE, f"{name!r} is not published")
    except ModelInUse as error:
        return _say(UNPUBLISH, EXIT_IN_USE, str(error))
    except RequestsUnfinished as error:
        return _say(UNPUBLISH, EXIT_UNFINISHED, f"{error} with --end-requests")
    return _say(UNPUBLISH, EXIT_DONE, f"{name!r} was removed; {ended} requests were ended")


# -- pagestream-adapters --

_ADAPTERS_EPILOG = """\
exit codes: 0 each adapter is loaded, or refused in its result; 1 Redis doesn't answer; 2 wrong options.
Repeat it after any error."""


def run_adapters(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run `pagestream-adapters`; returns its exit code."""
    parser = _parser(
        ADAPTERS, "Loads LoRA adapters, and unloads others. The result is JSON: a revision or an error by name."
    )
    parser.epilog = _ADAPTERS_EPILOG
    parser.add_argument("model", metavar="MODEL", help="served name of the base model")
    parser.add_argument("--redis", metavar="URL", help=f"default: {_REDIS}")
    parser.add_argument("--load", type=_pair, action="append", default=[], metavar="NAME=FOLDER", help="load this one")
    parser.add_argument(
        "--unload",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=REVISION",
        help="unload this one, unless another revision is loaded under its name",
    )
    parser.add_argument("--result", type=Path, metavar="FILE", help="for the result (default: standard output)")
    options = parser.parse_args(arguments)
    try:
        results = asyncio.run(_change_adapters(*_redis_of(options, environ), options))
    except StreamsError as error:
        return _say(ADAPTERS, EXIT_UNAVAILABLE, str(error))
    except ValueError as error:
        return _say(ADAPTERS, EXIT_BAD_OPTIONS, str(error))
    for name, result in results.items():
        _say(ADAPTERS, EXIT_DONE, f"{name}: {result}")
    text = as_json(results)
    if options.result is None:
        print(text)  # noqa: T201
    else:
        options.result.write_text(text)
    return EXIT_DONE


async def _change_adapters(
    url: str, settings: StreamsSettings, options: argparse.Namespace
) -> dict[str, dict[str, str]]:
    async with await Broker.connect(url, settings) as broker:
        for name, revision in options.unload:
            await _unload(broker, name, revision)
        return {name: await _load(broker, options.model, name, folder) for name, folder in options.load}


async def _unload(broker: Broker, name: str, revision: str) -> None:
    held = (await broker.adapters.all()).get(name)
    if held is None or held.revision != revision:
        return  # unloaded, or loaded anew, by hand
    try:
        await broker.adapters.withdraw(name)
    except ModelNotFound:
        return


async def _load(broker: Broker, model: str, name: str, folder: str) -> dict[str, str]:
    try:
        revision = await asyncio.to_thread(adapter_revision, Path(folder))
        await broker.adapters.publish(Adapter(name=name, model=model, path=folder, revision=revision))
    except AdapterRefused as error:
        return {"error": str(error)}
    return {"revision": revision}


def as_json(results: Mapping[str, Mapping[str, str]]) -> str:
    """Return the results as JSON of at most MOST_RESULT_BYTES; errors are cut where they are too long for that."""
    longest = MOST_RESULT_BYTES
    while True:
        cut = {name: {kind: text[:longest] for kind, text in each.items()} for name, each in results.items()}
        written = json.dumps(cut, separators=(",", ":"))
        if len(written) <= MOST_RESULT_BYTES or longest <= _REVISION_DIGITS:
            return written
        longest = max(longest // 2, _REVISION_DIGITS)


# -- both --


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _redis_of(options: argparse.Namespace, environ: Mapping[str, str] | None) -> tuple[str, StreamsSettings]:
    """Return address and settings of the Redis that is changed. ValueError where none is named, or one is malformed."""
    environ = os.environ if environ is None else environ
    url = options.redis or environ.get(_REDIS, "")
    if not url:
        raise ValueError(f"--redis is needed; give it, or set {_REDIS}")
    return url, settings_from_environment(environ)


def _say(command: str, code: int, text: str) -> int:
    print(f"{command}: {text}", file=sys.stderr)  # noqa: T201
    return code


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} was given, a number of seconds from 0 on is expected")
    return seconds


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} was given, NAME=VALUE is expected")
    return name, value
