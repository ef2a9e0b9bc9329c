"""What can go wrong in the operator, as one tree.

OperatorError
|- SettingsError     a setting is unknown, malformed or missing (a ValueError too)
|- PoolInvalid       an EnginePool's spec can't be acted on (a ValueError too)
|- NotLeading        a write was held back: this process is not, or not surely, the leader
|- Rejected          the API server refused a request for good; says what it said
|- Conflict          an object has moved on since it was read: read again
|- Gone              an object isn't there
`- ApiUnavailable    the API server can't be reached, or is busy: try again later
"""

# ruff: noqa: N818 -- said as people say it: "the pool is invalid"

from __future__ import annotations


class OperatorError(Exception):
    """The root of this package's errors."""


class SettingsError(OperatorError, ValueError):
    """A setting is unknown, malformed or missing; the message names it."""


class PoolInvalid(OperatorError, ValueError):
    """An EnginePool's spec can't be acted on; the message names the fields."""


class Blocked(OperatorError):
    """An object of another owner has a name that a pool's object needs."""


class NotLeading(OperatorError):
    """A write was held back: this process is not the leader, or can't be sure to be."""


class ApiFailure(OperatorError):
    """A request to the API server failed.

    Attributes:
        status: its HTTP status; 0 where there was no answer.
    """

    def __init__(self, what: str, status: int = 0, *, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.status = status
        self.retry_after_s = retry_after_s


class Rejected(ApiFailure):
    """The API server refused a request, and would again."""


class Conflict(ApiFailure):
    """An object has moved on since it was read, or exists already."""


class Gone(ApiFailure):
    """An object isn't there."""


class ApiUnavailable(ApiFailure):
    """The API server can't be reached, timed out, or asks for patience."""
