"""What a batch needs of the API that its jobs are calls of."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pagestream_batches.batches import Tokens

from pagestream_gateway.core.drafts import Draft
from pagestream_gateway.core.identities.identity import Identity


@dataclass(frozen=True)
class ParsedJob:
    """A line of a batch's file."""

    custom_id: str
    """Its caller's name for it."""
    draft: Draft
    field_names: Mapping[str, str] = field(default_factory=dict)
    """See ParsedRequest."""


class JobResult(NamedTuple):
    """What a job came to."""

    status: int
    """That of an HTTP answer; 0 where there is none, since the job did not run."""
    body: bytes
    """JSON: the answer, or what is wrong."""
    request_id: str = ""
    tokens: Tokens = Tokens()


@dataclass(frozen=True)
class Problem:
    """What is wrong with a line."""

    code: str
    message: str
    field: str | None
    line: int | None


class JobApi(Protocol):
    """Reads jobs, and writes their results, as calls of the endpoint would be read and answered."""

    def parse(self, endpoint: str, data: bytes) -> ParsedJob:
        """Read a line. Raises InvalidRequest. This is CPU work."""

    def custom_id(self, data: bytes) -> str:
        """Return the name of a job whose line has been parsed before. This is CPU work."""

    async def answer(self, request_id: str, identity: Identity) -> JobResult:
        """Return the answer of a request that has ended. Raises the request's own error, RequestNotFound, Unavailable,
        Overloaded.
        """

    def refusal(self, error: Exception, job: ParsedJob | None = None, request_id: str = "") -> JobResult:
        """Return what the call would have been refused with."""

    def problem(self, error: Exception, line: int, job: ParsedJob | None = None) -> Problem:
        """Return what is wrong with a line, which `parse` has refused or made this job of."""

    def code(self, error: Exception) -> str:
        """Return the code of an error."""

    def wait_s(self, error: Exception) -> float | None:
        """Return the seconds after which a retry may succeed; None where a retry changes nothing."""
