"""The pagestream command: serve, generate, chat, bench, doctor."""

from pagestream_cli.errors import CliError

__all__ = ["CliError"]
