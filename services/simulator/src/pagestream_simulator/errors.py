"""Errors of the simulator, as one tree."""

from __future__ import annotations


class SimulatorError(Exception):
    """A simulation can't run. `hint` says what to do; `exit_code` is what a command exits with."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class SettingInvalidError(SimulatorError):
    """A policy, a term or an option has an unknown name, a value out of its range, or does not fit the trace."""

    exit_code = 2


class InputFileInvalidError(SettingInvalidError):
    """A trace, an engine profile, a prompt file or a scenario can't be read or is malformed."""


class CompilerMissingError(SimulatorError):
    """The simulated fleet can't be compiled on this machine."""
