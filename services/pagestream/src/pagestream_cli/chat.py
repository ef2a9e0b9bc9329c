"""`pagestream chat`.

What needs the client is imported where it is used: it takes a second, which `--help` has no use for.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from pagestream_cli.console import can_redraw, say
from pagestream_cli.datadir import DataDir
from pagestream_cli.errors import CliError, RequestRejectedError, UsageError
from pagestream_cli.generate import add_sampling_arguments, add_server_arguments, fields

if TYPE_CHECKING:
    from pathlib import Path

    from pagestream_client import ModelInfo

    from pagestream_cli.client.endpoint import Endpoint

Message = dict[str, str]
HELP = """\
/model [NAME]   list the models, or talk to another one
/system [TEXT]  show the system message, or set it and begin anew
/reset          forget the conversation
/help           show this
/quit           end, as Ctrl-D does; Ctrl-C stops an answer"""
MOST_REMEMBERED = 1000
"""Lines of input that are kept for later conversations."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of chat."""
    parser.add_argument("--system", metavar="TEXT", help="system message before the conversation")
    parser.add_argument(
        "--markdown",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="format answers in a terminal (default: yes)",
    )
    add_server_arguments(parser)
    add_sampling_arguments(parser, max_tokens=256)


def run(arguments: argparse.Namespace) -> int:
    """Hold a conversation; where stdin is a pipe, answer the one message that it holds.

    Raises:
        CliError: no server answers, or a stream could not be resumed.
    """
    from pagestream_cli.client.endpoint import find_endpoint
    from pagestream_cli.client.gateways import choose_model

    data_dir = DataDir.at(arguments.data_dir)
    endpoint = find_endpoint(arguments.url, data_dir, arguments.api_key)
    if sys.stdin.isatty():
        model = arguments.model or _picked(endpoint)
        is_formatted = arguments.markdown and can_redraw(sys.stdout)
        return _talk(Conversation(endpoint, model, arguments, is_formatted=is_formatted), data_dir.path)
    model = asyncio.run(choose_model(endpoint, arguments.model))
    if not (message := sys.stdin.read().strip()):
        raise CliError("stdin is empty", hint="pipe a message, or start chat at a terminal")
    asyncio.run(Conversation(endpoint, model, arguments).send(message))
    return 0


class Conversation:
    """The messages so far, and how they are sent."""

    def __init__(
        self, endpoint: Endpoint, model: str, arguments: argparse.Namespace, *, is_formatted: bool = False
    ) -> None:
        self.endpoint = endpoint
        self.model = model
        self.system: str = arguments.system or ""
        self._fields = fields(arguments)
        self._is_formatted = is_formatted
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
        from pagestream_cli.client.gateways import show_answer, show_formatted_answer

        opening: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*self._messages, {"role": "user", "content": message}]
        show = show_formatted_answer if self._is_formatted else show_answer
        request = {"model": self.model, **self._fields, "messages": [*opening, *messages]}
        answer = await show(self.endpoint, request)
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        return answer


def _picked(endpoint: Endpoint) -> str:
    """Return what serve was started with, the only model with engines, or the one that the user picks.

    Raises:
        UsageError: there is no model, or none was picked.
    """
    from pagestream_cli.client.gateways import default_model, marked

    models = _models(endpoint)
    if (found := default_model(endpoint, models)) is not None:
        return found
    if not models:
        raise UsageError("the server has no models yet", hint="an engine publishes its model when it has started")
    for number, model in enumerate(models, 1):
        say(f"{number:>3}  {marked(model)}")
    names = [model.name for model in models]
    while True:
        try:
            given = input("model: ").strip()
        except (EOFError, KeyboardInterrupt) as error:
            raise UsageError("no model was picked", hint="name one with --model") from error
        if (picked := choice_of(given, names)) is not None:
            return picked
        say(f"{given!r} is neither a number from 1 to {len(names)} nor a model's name")


def choice_of(given: str, names: list[str]) -> str | None:
    """Return the name that a number or a name means; None for neither."""
    if given in names:
        return given
    number = int(given) if given.isascii() and given.isdigit() and len(given) < 6 else 0
    return names[number - 1] if 1 <= number <= len(names) else None


def _models(endpoint: Endpoint) -> list[ModelInfo]:
    """Return the models, those with engines first."""
    from pagestream_cli.client.gateways import models_of

    return sorted(asyncio.run(models_of(endpoint)), key=lambda model: (not model.is_running, model.name))


def _talk(conversation: Conversation, folder: Path) -> int:
    with _Remembered(folder / "chat_history"):
        say(f"Talking to {conversation.model}. /help lists the commands.")
        while True:
            try:
                message = input("> ").strip()
            except (EOFError, KeyboardInterrupt):
                say("")
                return 0
            if message == "/quit":
                return 0
            if message.startswith("/"):
                _command(conversation, message)
            elif message:
                _turn(conversation, message)


def _command(conversation: Conversation, line: str) -> None:
    verb, _, rest = line.partition(" ")
    rest = rest.strip()
    try:
        match verb:
            case "/reset":
                conversation.reset()
            case "/system":
                if rest:
                    conversation.system = rest
                    conversation.reset()
                say(conversation.system or "there is no system message")
            case "/model":
                _change_model(conversation, rest)
            case _:
                say(HELP)
    except CliError as error:
        say(f"error: {error}")


def _change_model(conversation: Conversation, given: str) -> None:
    from pagestream_cli.client.gateways import marked

    models = _models(conversation.endpoint)
    name = choice_of(given, [model.name for model in models])
    if name is not None:
        conversation.model = name
        say(f"Talking to {name}; the conversation goes on.")
        return
    for number, model in enumerate(models, 1):
        say(f"{'*' if model.name == conversation.model else ' '}{number:>3}  {marked(model)}")


def _turn(conversation: Conversation, message: str) -> None:
    try:
        asyncio.run(conversation.send(message))
    except KeyboardInterrupt:
        say("(stopped)")
    except RequestRejectedError as error:
        say(f"error: {error}")


class _Remembered:
    """Input lines with history and editing; what was typed is kept in a file that its owner alone can read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> None:
        import readline

        readline.set_history_length(MOST_REMEMBERED)
        with suppress(OSError):  # there is none yet
            readline.read_history_file(self._file)

    def __exit__(self, *_: object) -> None:
        import readline

        with suppress(OSError):  # without a folder to write to, the conversation was all there is
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file.touch(mode=0o600)
            readline.write_history_file(self._file)
