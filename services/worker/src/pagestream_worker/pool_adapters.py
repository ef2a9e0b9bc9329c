"""The command `pagestream-adapters`: load the LoRA adapters of a pool's spec, and unload those that have left it."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pagestream.v1.records_pb2 import Adapter
from pagestream_streams import AdapterRefused, Broker, StreamsError, StreamsSettings, settings_from_environment
from pagestream_streams.admin.adapters import adapter_revision
from pagestream_streams.errors import ModelNotFound

EXIT_DONE, EXIT_UNAVAILABLE, EXIT_BAD_OPTIONS = 0, 1, 2
MOST_RESULT_BYTES = 4096
"""Of the message that a container leaves to Kubernetes."""

_REDIS = "PAGESTREAM_WORKER__REDIS"
_EPILOG = """exit codes: 0 each adapter is loaded, or refused in its result; 1 Redis doesn't answer; 2 wrong options.
Repeat it after any error."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of `pagestream-adapters`."""
    parser = argparse.ArgumentParser(
        prog="pagestream-adapters",
        description="Loads LoRA adapters, and unloads others. The result is JSON: a revision or an error by name.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    return parser


def main(arguments: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run the command; returns its exit code."""
    environ = os.environ if environ is None else environ
    options = build_parser().parse_args(arguments)
    url = options.redis or environ.get(_REDIS, "")
    try:
        if not url:
            raise ValueError(f"--redis is needed; give it, or set {_REDIS}")
        results = asyncio.run(_apply(url, settings_from_environment(environ), options))
    except StreamsError as error:
        return _fail(EXIT_UNAVAILABLE, str(error))
    except ValueError as error:
        return _fail(EXIT_BAD_OPTIONS, str(error))
    for name, result in results.items():
        print(f"pagestream-adapters: {name}: {result}", file=sys.stderr)  # noqa: T201
    text = as_json(results)
    if options.result is None:
        print(text)  # noqa: T201
    else:
        options.result.write_text(text)
    return EXIT_DONE


def as_json(results: Mapping[str, Mapping[str, str]]) -> str:
    """Return the results as JSON of at most MOST_RESULT_BYTES; errors are cut where they are too long for that."""
    longest = MOST_RESULT_BYTES
    while True:
        cut = {name: {kind: text[:longest] for kind, text in each.items()} for name, each in results.items()}
        written = json.dumps(cut, separators=(",", ":"))
        if len(written) <= MOST_RESULT_BYTES or longest <= _REVISION_DIGITS:
            return written
        longest = max(longest // 2, _REVISION_DIGITS)


_REVISION_DIGITS = 32


async def _apply(url: str, settings: StreamsSettings, options: argparse.Namespace) -> dict[str, dict[str, str]]:
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


def _fail(code: int, text: str) -> int:
    print(f"pagestream-adapters: {text}", file=sys.stderr)  # noqa: T201
    return code


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} was given, NAME=VALUE is expected")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
