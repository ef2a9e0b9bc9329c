"""`pagestream generate`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from typing import Any

from pagestream_cli.console import show
from pagestream_cli.datadir import DataDir
from pagestream_cli.errors import CliError, UsageError
from pagestream_cli.generation import sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of generate."""
    parser.add_argument("prompt", nargs="?", help="the prompt (default: stdin)")
    parser.add_argument("--offline", metavar="MODEL", help="run this model folder in this process, without a server")
    sampling.add_server_arguments(parser)
    sampling.add_arguments(parser, max_tokens=128)


def run(arguments: argparse.Namespace) -> int:
    """Complete the prompt and stream the completion to stdout.

    Raises:
        CliError: no server answers, it refuses the request, or a stream could not be resumed.
    """
    prompt = _prompt(arguments.prompt)
    if arguments.offline is not None:
        show(complete_offline(arguments.offline, prompt, sampling.fields(arguments)) + "\n")
        return 0
    asyncio.run(_complete(arguments, prompt))
    return 0


async def _complete(arguments: argparse.Namespace, prompt: str) -> None:
    from pagestream_cli.client.answer import show_answer
    from pagestream_cli.client.endpoint import find_endpoint
    from pagestream_cli.client.models import choose_model

    endpoint = find_endpoint(arguments.url, DataDir.at(arguments.data_dir), arguments.api_key)
    model = await choose_model(endpoint, arguments.model)
    await show_answer(endpoint, {"model": model, "prompt": prompt, **sampling.fields(arguments)})


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
