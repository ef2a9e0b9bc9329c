"""What can go wrong in a command, in words for the person who typed it."""

from __future__ import annotations


class CliError(Exception):
    """A command failed. `hint` says what to do about it; `exit_code` is the process's."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(CliError):
    """The options contradict each other or name something that does not exist."""

    exit_code = 2


class DataDirError(CliError):
    """The data folder cannot be used."""


class DataDirBusyError(DataDirError):
    """Another `pagestream serve` uses the data folder."""


class PortTakenError(CliError):
    """A port that serve was told to use belongs to another process."""


class ServeFileInvalidError(CliError):
    """serve.json is not what serve writes."""


class PartFailedError(CliError):
    """A part of serve cannot be started."""


class PartOptionsError(PartFailedError):
    """A part of serve refuses what it was started with."""

    exit_code = 2


class ServerNotFoundError(CliError):
    """No server answers where one was expected."""


class NotFoundError(CliError):
    """There is no such request or model."""


class ReplayFailedError(CliError):
    """A request can't be generated again."""


class RequestRejectedError(CliError):
    """The server answered with an error that a retry does not change."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server answered {status}: {message}")
        self.status = status


class StreamLostError(CliError):
    """A stream broke and could not be resumed within the limit."""
