"""The `pagestream` command. The code of each command is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from pagestream_simulator.errors import SimulatorError

from pagestream_cli.console import say
from pagestream_cli.errors import CliError, UsageError


class Command(NamedTuple):
    """A verb, its help text, and the modules of its options and of its work."""

    verb: str
    help: str
    options: str
    """Module with `add_arguments(parser)`; it must not import a heavy library."""
    work: str
    """Module with `run(arguments) -> exit code`."""


SERVE = "serve"
COMMANDS = (
    Command(
        SERVE,
        "serve a model on this machine: gateways, Redis and engines in one command",
        "serve.options",
        "serve.command",
    ),
    Command(
        "demo",
        "read streams while engines, gateways and Redis are killed, and compare them with undisturbed ones",
        "demo.options",
        "demo.command",
    ),
    Command("generate", "complete a prompt, streaming", "generate", "generate"),
    Command("chat", "talk to the model in the terminal", "chat", "chat"),
    Command("bench", "put a running server under load and measure it", "bench.options", "bench.command"),
    Command("replay", "generate a past request again and compare token by token", "replay", "replay"),
    Command(
        "simulate",
        "run a trace through scaling laws and a model of engines, and compare",
        "simulate",
        "simulate",
    ),
    Command("top", "show engines, KV caches and queues of the running models, live", "top", "top"),
    Command("models", "list the models, load and unload them, remove one without engines", "models", "models"),
    Command("adapters", "list, load and unload LoRA adapters", "adapters", "adapters"),
    Command("keys", "make, list and revoke API keys", "keys", "keys"),
    Command("usage", "show what tenants have used: requests and tokens, by model and key", "usage", "usage"),
    Command("dead", "show quarantined requests, and requeue them", "quarantine", "quarantine"),
    Command("completion", "print what a shell needs to complete commands", "completion", "completion"),
    Command(
        "doctor", "report what this machine has, what is wrong, and what to do", "doctor.command", "doctor.command"
    ),
)


class _Parser(argparse.ArgumentParser):
    """A parser without abbreviations, which takes the command lines of `vllm serve` behind `serve`."""

    serve: argparse.ArgumentParser | None = None
    """The parser of `serve`, in that of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As `argparse`."""
        given = sys.argv[1:] if args is None else list(args)
        if self.serve is not None and given[:1] == [SERVE]:
            from pagestream_cli.serve.vllm_line import translate

            try:
                given = [SERVE, *translate(given[1:], self.serve._option_string_actions)]
            except UsageError as error:
                self.serve.exit(error.exit_code, f"error: {error}\n" + (f"  {error.hint}\n" if error.hint else ""))
        return super().parse_known_args(given, namespace)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = _Parser(
        prog="pagestream",
        description="Serve language models; token streams survive the death of any process.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND")
    for command in COMMANDS:
        sub = verbs.add_parser(
            command.verb,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
        )
        if command.verb == SERVE:
            parser.serve = sub
        _module(command.options).add_arguments(sub)
        sub.set_defaults(work=command.work)
    helping = verbs.add_parser("help", help="explain a command")
    helping.add_argument("topic", nargs="?", choices=[command.verb for command in COMMANDS], help="the command")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code of the process."""
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.version:
        return _print_version()
    if parsed.verb in (None, "help"):
        return _help(parser, getattr(parsed, "topic", None))
    run: Callable[[argparse.Namespace], int] = _module(parsed.work).run
    with _interrupted_by_signals():
        return guarded(lambda: run(parsed))


def guarded(work: Callable[[], int]) -> int:
    """Print errors that a user can act on and return their exit code; other errors keep their traceback."""
    try:
        return work()
    except (CliError, SimulatorError) as error:
        say(f"error: {error}")
        if error.hint:
            say(f"  {error.hint}")
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has closed the pipe; a message would fail as well
        return 141


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Have SIGTERM end a command in order, as Ctrl-C does, and SIGINT where a background shell has it ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _module(name: str) -> Any:
    return importlib.import_module(f"pagestream_cli.{name}")


def _print_version() -> int:
    from importlib.metadata import version

    print(f"pagestream {version('pagestream')}")
    return 0


def _help(parser: argparse.ArgumentParser, topic: str | None) -> int:
    if topic is None:
        parser.print_help()
    else:
        parser.parse_args([topic, "--help"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
