"""What can go wrong in the operator, as one tree.

OperatorError
|- SettingsError      a setting is unknown, malformed or missing, or there is no access to Kubernetes (a ValueError too)
|- PoolInvalid        the spec of an EnginePool can't be acted on (a ValueError too)
|- Unreadable         an object lacks what every object has
|- Blocked            an object of another owner has a name that a pool's object needs
|- NotLeading         a write was held back: this replica is not, or not surely, the leader
|- SinkUnavailable    the OTLP port can't be opened
|- SinkFileInvalid    the OTLP port's certificate or token can't be read
|- SourceUnavailable  Prometheus can't be asked: try again later
`- ApiFailure         a call of the API server failed
   |- Rejected        it refused, and would again
   |- Conflict        the object has changed since it was read: read again
   |- Gone            the object doesn't exist
   `- ApiUnavailable  it can't be reached, or is busy: try again later
"""

# ruff: noqa: N818 -- named after what is the case: "the pool is invalid"

from __future__ import annotations


class OperatorError(Exception):
    """The root of this package's errors."""


class SettingsError(OperatorError, ValueError):
    """A setting is unknown, malformed or missing; the message names it."""


class PoolInvalid(OperatorError, ValueError):
    """The spec of an EnginePool can't be acted on; the message names the fields."""


class Unreadable(OperatorError):
    """An object lacks what every object has."""


class Blocked(OperatorError):
    """An object of another owner has a name that a pool's object needs."""


class NotLeading(OperatorError):
    """A write was held back: this replica is not the leader, or can't be sure to be."""


class SinkUnavailable(OperatorError):
    """The OTLP port can't be opened."""

    def __init__(self, address: str) -> None:
        """`address` is host:port."""
        super().__init__(f"the metrics sink can't listen at {address}; does another process listen there?")
        self.address = address


class SinkFileInvalid(OperatorError):
    """A file with the certificate or the token of the OTLP port can't be read, or is empty."""


class SourceUnavailable(OperatorError):
    """Prometheus can't be reached, or refused a query. Trying again later is right."""


class ApiFailure(OperatorError):
    """A call of the API server failed.

    The class says what to do next, by the first answer. What lasts is another matter: a webhook that is down answers
    like a busy server, and a right may come back. `pool/parts.py` judges by that.

    Attributes:
        status: HTTP status of the answer; 0 where there was none.
        retry_after_s: seconds that the API server asked to wait, if it did.
    """

    def __init__(self, what: str, status: int = 0, *, retry_after_s: float | None = None) -> None:
        super().__init__(what)
        self.status = status
        self.retry_after_s = retry_after_s


class Rejected(ApiFailure):
    """The API server refused a call, and would refuse it again."""


class Conflict(ApiFailure):
    """An object has changed since it was read, or exists already."""


class Gone(ApiFailure):
    """An object doesn't exist."""


class ApiUnavailable(ApiFailure):
    """The API server can't be reached, timed out, or is busy."""
