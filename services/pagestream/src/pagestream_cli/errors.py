"""The errors of commands. Their messages are shown to the user, without a traceback."""

from __future__ import annotations


class CliError(Exception):
    """A command failed. `hint` says what to do; `exit_code` is that of the process."""

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
    """A port that serve should use is in use by another process."""


class ServeFileInvalidError(CliError):
    """serve.json does not have the form that serve writes."""


class PartFailedError(CliError):
    """A part of serve cannot be started."""


class PartOptionsError(PartFailedError):
    """A part of serve refuses its options."""

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
