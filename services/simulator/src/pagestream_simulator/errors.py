"""Errors of the simulator, as one tree."""

from __future__ import annotations


class SimulatorError(Exception):
    """A simulation can't run. `hint` says what to do about it; `exit_code` is a command's."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class SettingInvalidError(SimulatorError):
    """A policy, a term or an option has no meaning."""

    exit_code = 2


class WorkloadInvalidError(SettingInvalidError):
    """A trace, a profile or a prompt file is not in a form that is read here."""


class CompilerMissingError(SimulatorError):
    """The simulated fleet can't be compiled on this machine."""
