"""Errors of settings, instruments and endpoints.

TelemetryError
|- VariableError     an environment variable is unknown or malformed (a ValueError too); the message names it
`- EndpointError     a port for probes and metrics can't be bound
"""


class TelemetryError(Exception):
    """Base class; the message is written for the person who starts the process."""


class VariableError(TelemetryError, ValueError):
    """An environment variable is unknown or malformed.

    Attributes:
        variable: name of the environment variable.
    """

    def __init__(self, variable: str, problem: str) -> None:
        super().__init__(f"{variable}: {problem}")
        self.variable = variable


class EndpointError(TelemetryError):
    """A port for probes and metrics is taken, or its address is not of this machine."""
