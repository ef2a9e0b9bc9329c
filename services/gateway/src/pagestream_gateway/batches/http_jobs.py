"""The jobs of batches as calls of the HTTP API: what a line may say, and how its result is written."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pagestream_batches.batches import Tokens
from pydantic import Field

from pagestream_gateway.auth.identity import Identity
from pagestream_gateway.batches.jobs import JobResult, ParsedJob, Problem
from pagestream_gateway.error_codes import ErrorReport, error_report
from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import Body, RequestWarnings, collecting, parse_body, parse_json, within
from pagestream_gateway.openai import completions, embeddings
from pagestream_gateway.openai.chat import completions as chat_completions
from pagestream_gateway.openai.errors import error_body
from pagestream_gateway.openai.generation import ParsedRequest
from pagestream_gateway.openai.responses import body as responses
from pagestream_gateway.streams.finished import collect

_MAX_NAME_CHARS = 512
_ANSWERS_AT_ONCE = 4  # are read from their logs: callers' own answers need the same memory
_Parser = Callable[[dict[str, Any], Mapping[str, str]], ParsedRequest]


class JobLine(Body):
    """A line of a batch's file, or an item of `requests`."""

    custom_id: str = Field(
        min_length=1, max_length=_MAX_NAME_CHARS, description="The caller's name for it, which no other line has."
    )
    method: Literal["POST"] = "POST"
    url: str | None = Field(None, description="The batch's endpoint.")
    body: dict[str, Any] = Field(description="The body of a call of the endpoint; it is not streamed.")


def _response(document: dict[str, Any], headers: Mapping[str, str]) -> ParsedRequest:
    parsed = responses.parse(document, headers)
    if parsed.previous_id:
        raise UnsupportedField("previous_response_id", "a job has its whole conversation in `input`")
    return ParsedRequest(parsed.going_on((), _ANY_BYTES), parsed.stream, parsed.field_names)


_ANY_BYTES = 2**31  # the line is bounded already
PARSERS: Mapping[str, _Parser] = {
    "/v1/chat/completions": chat_completions.parse,
    "/v1/completions": completions.parse,
    "/v1/embeddings": embeddings.parse,
    "/v1/responses": _response,
}
"""By endpoint."""


class HttpJobApi:
    """See JobApi."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._turns = asyncio.Semaphore(_ANSWERS_AT_ONCE)

    def parse(self, endpoint: str, data: bytes) -> ParsedJob:
        """See JobApi. Errors name the fields of the line: "custom_id", "body.max_tokens"."""
        with collecting(RequestWarnings(ignores_unknown=self.gateway.settings.gateway.ignores_unknown_fields)):
            line = parse_body(JobLine, parse_json(data))
            if line.url not in (None, endpoint):
                raise InvalidRequest("url", f"must be the batch's endpoint, {endpoint}, got {line.url[:100]!r}")
            with within("body"):
                parsed = PARSERS[endpoint](line.body, {})
                if parsed.stream:
                    raise UnsupportedField("stream", "the answers of a batch are in its output file")
        return ParsedJob(line.custom_id, parsed.draft, parsed.field_names)

    def custom_id(self, data: bytes) -> str:
        """See JobApi."""
        return str(json.loads(data)["custom_id"])

    async def answer(self, request_id: str, identity: Identity) -> JobResult:
        """See JobApi."""
        view = await self.gateway.requests.view(request_id, identity.tenant)
        most = self.gateway.settings.batches.max_answer_bytes
        async with self._turns:
            body, usage = await collect(self.gateway, view.spec, max_bytes=most)
        tokens = Tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return JobResult(200, body, request_id, tokens)

    def refusal(self, error: Exception, job: ParsedJob | None = None, request_id: str = "") -> JobResult:
        """See JobApi."""
        report = _report(error, job)
        return JobResult(report.http_status, json.dumps(error_body(report)).encode(), request_id)

    def problem(self, error: Exception, line: int, job: ParsedJob | None = None) -> Problem:
        """See JobApi."""
        report = _report(error, job)
        field = report.field if job is None or report.field is None else f"body.{report.field}"
        return Problem(report.code, report.message, field, line)

    def code(self, error: Exception) -> str:
        """See JobApi."""
        return error_report(error).code

    def wait_s(self, error: Exception) -> float | None:
        """See JobApi. Errors of a request that may succeed later say when."""
        return error_report(error).retry_after_s


def _report(error: Exception, job: ParsedJob | None) -> ErrorReport:
    """Return how an error is reported, with the names that a job's body has for its fields."""
    if isinstance(error, InvalidRequest) and error.field is not None and job is not None:
        error.field = job.field_names.get(error.field, error.field)
    return error_report(error)
