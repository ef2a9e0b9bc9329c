"""The pagestream command: serve, generate, chat, bench, replay, simulate, dead, doctor."""

from pagestream_cli.errors import CliError

__all__ = ["CliError"]
