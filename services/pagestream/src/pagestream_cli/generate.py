"""`pagestream generate`, and the options that it shares with chat: the server, and the sampling parameters."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from pagestream_cli.client.endpoint import KEY_VARIABLES
from pagestream_cli.console import show
from pagestream_cli.datadir import DataDir
from pagestream_cli.errors import CliError, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of generate."""
    parser.add_argument("prompt", nargs="?", help="the prompt (default: stdin)")
    parser.add_argument("--offline", metavar="MODEL", help="run this model folder in this process, without a server")
    add_server_arguments(parser)
    add_sampling_arguments(parser, max_tokens=128)


def run(arguments: argparse.Namespace) -> int:
    """Complete the prompt and stream the completion to stdout.

    Raises:
        CliError: no server answers, it refuses the request, or a stream could not be resumed.
    """
    prompt = _prompt(arguments.prompt)
    if arguments.offline is not None:
        show(complete_offline(arguments.offline, prompt, fields(arguments)) + "\n")
        return 0
    asyncio.run(_complete(arguments, prompt))
    return 0


async def _complete(arguments: argparse.Namespace, prompt: str) -> None:
    from pagestream_cli.client.endpoint import find_endpoint
    from pagestream_cli.client.gateways import choose_model, show_answer

    endpoint = find_endpoint(arguments.url, DataDir.at(arguments.data_dir), arguments.api_key)
    model = await choose_model(endpoint, arguments.model)
    await show_answer(endpoint, {"model": model, "prompt": prompt, **fields(arguments)})


def complete_offline(model: str, prompt: str, fields: Mapping[str, Any]) -> str:
    """Complete one prompt in this process, without gateway, Redis and worker.

    Raises:
        UsageError: `model` is no model folder.
        CliError: the engine refuses the request.
    """
    from pagestream_cli.serve.model import choose_model

    choice = choose_model(model, None)
    from pagestream_engine import LLM, SamplingParams

    try:
        outputs = LLM(choice.source).generate([prompt], SamplingParams(**fields))
    except ValueError as error:
        raise CliError(str(error)) from error
    return outputs[0].outputs[0].text


def _prompt(given: str | None) -> str:
    if given is not None:
        return given
    if sys.stdin.isatty():
        raise UsageError("no prompt was given", hint='pagestream generate "Once upon a time"')
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CliError(f"stdin is not UTF-8 text: {error.reason} at byte {error.start}") from error


KEYS = ", ".join(f"${name}" for name in KEY_VARIABLES)
FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
"""Sampling parameters with an option, by the names of the API."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the server to call."""
    parser.add_argument(
        "--url", metavar="URL", help="a gateway's base URL (default: the serve that runs in the data folder)"
    )
    parser.add_argument("--data-dir", metavar="DIR", help="the data folder of that serve")
    parser.add_argument("--api-key", metavar="KEY", help=f"default: the first of {KEYS} that is set")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="served name (default: that of serve, else the only one with engines)",
    )


def add_sampling_arguments(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Add the sampling options. Those that are not given have the model's defaults."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help="most tokens of the answer (default: %(default)s)",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="sampling temperature; 0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="nucleus probability in (0, 1]")
    parser.add_argument("--top-k", type=int, metavar="K", help="number of candidate tokens")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be given several times"
    )


def fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given."""
    return {name: value for name in FIELDS if (value := getattr(arguments, name)) is not None}
