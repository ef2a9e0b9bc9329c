"""`pagestream chat`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from pagestream_cli import sampling
from pagestream_cli.console import say
from pagestream_cli.datadir import DataDir
from pagestream_cli.errors import CliError, RequestRejectedError

if TYPE_CHECKING:
    from pagestream_cli.client.endpoint import Endpoint

Message = dict[str, str]
HELP = "/reset forgets the conversation, /quit (or Ctrl-D) ends it, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of chat."""
    parser.add_argument("--system", metavar="TEXT", help="system message before the conversation")
    sampling.add_server_arguments(parser)
    sampling.add_arguments(parser, max_tokens=256)


def run(arguments: argparse.Namespace) -> int:
    """Hold a conversation; where stdin is a pipe, answer the one message that it holds.

    Raises:
        CliError: no server answers, or a stream could not be resumed.
    """
    from pagestream_cli.client.endpoint import find_endpoint
    from pagestream_cli.client.models import choose_model

    endpoint = find_endpoint(arguments.url, DataDir.at(arguments.data_dir), arguments.api_key)
    model = asyncio.run(choose_model(endpoint, arguments.model))
    conversation = Conversation(endpoint, model, arguments)
    if sys.stdin.isatty():
        return _talk(conversation, model)
    if not (message := sys.stdin.read().strip()):
        raise CliError("stdin is empty", hint="pipe a message, or start chat at a terminal")
    asyncio.run(conversation.send(message))
    return 0


class Conversation:
    """The messages so far, and how they are sent."""

    def __init__(self, endpoint: Endpoint, model: str, arguments: argparse.Namespace) -> None:
        self._endpoint = endpoint
        self._fields = {"model": model, **sampling.fields(arguments)}
        self._system: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
        self._messages: list[Message] = []

    def reset(self) -> None:
        """Drop all messages but the system message."""
        self._messages = []

    async def send(self, message: str) -> str:
        """Send a message and show the answer. An answer that was interrupted or refused does not become part of the
        conversation.

        Raises:
            RequestRejectedError: the server refuses the conversation, for example because it has become too long.
            StreamLostError: the stream could not be resumed.
        """
        from pagestream_cli.client.answer import show_answer

        messages = [*self._messages, {"role": "user", "content": message}]
        answer = await show_answer(self._endpoint, {**self._fields, "messages": [*self._system, *messages]})
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        return answer


def _talk(conversation: Conversation, model: str) -> int:
    import readline  # noqa: F401  (gives input() its history and line editing)

    say(f"Talking to {model}. {HELP}.")
    while True:
        try:
            message = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            say("")
            return 0
        if message == "/quit":
            return 0
        if message == "/reset":
            conversation.reset()
        elif message.startswith("/"):
            say(HELP)
        elif message:
            _turn(conversation, message)


def _turn(conversation: Conversation, message: str) -> None:
    try:
        asyncio.run(conversation.send(message))
    except KeyboardInterrupt:
        say("(stopped)")
    except RequestRejectedError as error:
        say(f"error: {error}")
