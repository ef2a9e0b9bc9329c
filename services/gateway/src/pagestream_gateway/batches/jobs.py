"""The jobs of a batch: lines are read in slices and checked before any runs; each goes from its line to its result.

A line is a call of the HTTP API, and its result what that would have answered. Waits of a batch for what refuses it now
(Redis, the queue, a limit) and for the ends of requests that have no reader stand here, too.
"""

import asyncio
import hashlib
import json
import logging
import random
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

from pagestream.v1.inference_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_DEADLINE,
    ON_DISCONNECT_CONTINUE,
    REQUEST_STATE_FINISHED,
)
from pagestream_batches.batches import ERRORS, OUTPUT, Batch, BatchLease, Job, LeaseLost, Tokens, shorten_log
from pagestream_batches.files import FileStore
from pagestream_streams import Broker
from pagestream_streams.admin.broker import summaries_of
from pagestream_streams.errors import RequestNotFound, StreamsError, Unavailable
from pagestream_streams.gateway.accept import reserved_id
from pydantic import Field

from pagestream_gateway.auth.identity import Identity
from pagestream_gateway.calls import DISCONNECTED, OK
from pagestream_gateway.error_codes import ErrorReport, error_report
from pagestream_gateway.errors import GatewayError, InvalidRequest, UnsupportedField
from pagestream_gateway.gateway import Gateway, checked_draft
from pagestream_gateway.http.body import Body, RequestWarnings, collecting, parse_body, parse_json, within
from pagestream_gateway.models import LoadedModel
from pagestream_gateway.openai import chat as chat_completions
from pagestream_gateway.openai import completions, embeddings
from pagestream_gateway.openai.errors import error_body
from pagestream_gateway.openai.responses import body as responses
from pagestream_gateway.preparation import check_parameters
from pagestream_gateway.request import Draft
from pagestream_gateway.settings import PRIORITIES, LimitSettings
from pagestream_gateway.streams.requests import collect


@dataclass(frozen=True)
class BatchAbout:
    """A batch as its creator asked for it."""

    endpoint: str
    """Path of the API that its jobs are bodies of."""
    window: str
    """The completion window as it was given, such as "24h"."""
    identity: Identity
    """Whose requests its jobs are."""
    output_lifetime_s: int
    """Seconds for which its output is kept."""
    metadata: Mapping[str, str] | None = None

    def dumped(self) -> str:
        """Return it as the text that Redis keeps."""
        return json.dumps(asdict(self))


def about_of(text: str) -> BatchAbout:
    """Return what `dumped` has written; members that a later version has added are ignored."""
    given = json.loads(text)
    caller = given["identity"]
    return BatchAbout(
        endpoint=given["endpoint"],
        window=given["window"],
        identity=Identity(**{each.name: caller[each.name] for each in fields(Identity) if each.name in caller}),
        output_lifetime_s=given["output_lifetime_s"],
        metadata=given.get("metadata"),
    )


@dataclass(frozen=True)
class ParsedJob:
    """A line of a batch's file."""

    custom_id: str
    """Its caller's name for it."""
    draft: Draft


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


_MAX_NAME_CHARS = 512
_ANSWERS_AT_ONCE = 4  # are read from their logs: callers' own answers need the same memory
_Parser = Callable[[dict[str, Any], Mapping[str, str]], Draft]


class JobLine(Body):
    """A line of a batch's file, or an item of `requests`."""

    custom_id: str = Field(
        min_length=1, max_length=_MAX_NAME_CHARS, description="The caller's name for it, which no other line has."
    )
    method: Literal["POST"] = "POST"
    url: str | None = Field(None, description="The batch's endpoint.")
    body: dict[str, Any] = Field(description="The body of a call of the endpoint; it is not streamed.")


def _response(document: dict[str, Any], headers: Mapping[str, str]) -> Draft:
    parsed = responses.parse(document, headers)
    if parsed.previous_id:
        raise UnsupportedField("previous_response_id", "a job has its whole conversation in `input`")
    return parsed.going_on((), _ANY_BYTES)


_ANY_BYTES = 2**31  # the line is bounded already
PARSERS: Mapping[str, _Parser] = {
    "/v1/chat/completions": chat_completions.parse,
    "/v1/completions": completions.parse,
    "/v1/embeddings": embeddings.parse,
    "/v1/responses": _response,
}
"""By endpoint."""


class JobApi:
    """Reads jobs, and writes their results, as calls of the endpoint would be read and answered."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._turns = asyncio.Semaphore(_ANSWERS_AT_ONCE)

    def parse(self, endpoint: str, data: bytes) -> ParsedJob:
        """Read a line. This is CPU work.

        Raises InvalidRequest that names a field of the line: "custom_id", "body.max_tokens".
        """
        with collecting(RequestWarnings(ignores_unknown=self.gateway.settings.gateway.ignores_unknown_fields)):
            line = parse_body(JobLine, parse_json(data))
            if line.url not in (None, endpoint):
                raise InvalidRequest("url", f"must be the batch's endpoint, {endpoint}, got {line.url[:100]!r}")
            with within("body"):
                draft = PARSERS[endpoint](line.body, {})
                if draft.is_streamed:
                    raise UnsupportedField("stream", "the answers of a batch are in its output file")
        return ParsedJob(line.custom_id, draft)

    def custom_id(self, data: bytes) -> str:
        """Return the name of a job whose line has been parsed before. This is CPU work."""
        return str(json.loads(data)["custom_id"])

    async def answer(self, request_id: str, identity: Identity) -> JobResult:
        """Return the answer of a request that has ended. Raises the request's own error, RequestNotFound, Unavailable,
        Overloaded.
        """
        view = await self.gateway.requests.view(request_id, identity.tenant)
        most = self.gateway.settings.batches.max_answer_bytes
        async with self._turns:
            body, usage = await collect(self.gateway, view.spec, max_bytes=most)
        tokens = Tokens(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        return JobResult(200, body, request_id, tokens)

    def refusal(self, error: Exception, job: ParsedJob | None = None, request_id: str = "") -> JobResult:
        """Return what the call would have been refused with."""
        report = _report(error, job)
        return JobResult(report.http_status, json.dumps(error_body(report)).encode(), request_id)

    def problem(self, error: Exception, line: int, job: ParsedJob | None = None) -> Problem:
        """Return what is wrong with a line, which `parse` has refused or made this job of."""
        report = _report(error, job)
        field = report.field if job is None or report.field is None else f"body.{report.field}"
        return Problem(report.code, report.message, field, line)

    def code(self, error: Exception) -> str:
        """Return the code of an error."""
        return error_report(error).code

    def wait_s(self, error: Exception) -> float | None:
        """Return the seconds after which a retry may succeed; None where a retry changes nothing."""
        return error_report(error).retry_after_s


def _report(error: Exception, job: ParsedJob | None) -> ErrorReport:
    """Return how an error is reported, with the names that a job's body has for its fields."""
    if isinstance(error, InvalidRequest) and error.field is not None and job is not None:
        error.field = job.draft.field_names.get(error.field, error.field)
    return error_report(error)


logger = logging.getLogger(__name__)

T = TypeVar("T")
_LEAST_S, _MOST_S = 0.1, 60.0


class Waits:
    """Tries steps of a batch again, after as long as each refusal says."""

    def __init__(self, api: JobApi) -> None:
        self._api = api
        self._reasons: dict[object, str] = {}
        """Of the steps that wait now, in the order in which they began to."""

    @property
    def reason(self) -> str:
        """Code of what the first step that waits was refused for; "" where none waits."""
        return next(iter(self._reasons.values()), "")

    @contextmanager
    def shown(self, reason: str) -> Iterator[None]:
        """Let the block be a step that waits."""
        step = object()
        self._reasons[step] = reason
        try:
            yield
        finally:
            del self._reasons[step]

    async def for_success(self, step: Callable[[], Awaitable[T]]) -> T:
        """Return a step's result, once it has one. Raises the first error that no wait helps."""
        try:
            while True:
                try:
                    return await step()
                except (GatewayError, StreamsError) as error:
                    wait_s = self._api.wait_s(error)
                    if wait_s is None:
                        raise
                    reason = self._api.code(error)
                if reason not in self._reasons.values():
                    logger.info("a batch waits: %s", reason)
                self._reasons[step] = reason
                await asyncio.sleep(min(max(wait_s, _LEAST_S), _MOST_S) * random.uniform(1.0, 1.25))
        finally:
            self._reasons.pop(step, None)


_SHORTEST_S, _LONGEST_S = 0.1, 2.0  # between two looks: they get rarer while nothing ends


class RequestEnds:
    """The ends of a tenant's requests: one command for each, in one round trip for all.

    A reader would be woken for each token, which a batch has no use for.
    """

    def __init__(self, broker: Broker, tenant: str) -> None:
        self._broker = broker
        self._tenant = tenant
        self._awaited: dict[str, asyncio.Future[bool]] = {}
        self._changed = asyncio.Event()

    async def wait(self, request_id: str) -> bool:
        """Return True once a request has finished, False where there is none (any more). `run` must run."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._awaited[request_id] = future
        self._changed.set()
        try:
            return await future
        finally:
            self._awaited.pop(request_id, None)

    async def run(self) -> None:
        """Look until cancelled."""
        pause_s = _SHORTEST_S
        while True:
            if not self._awaited:
                self._changed.clear()
                await self._changed.wait()
            has_ended = False
            try:
                has_ended = await self._look()
            except Unavailable as error:
                logger.info("the ends of a batch's jobs are not known now: %s", error)
            pause_s = _SHORTEST_S if has_ended else min(_LONGEST_S, 1.5 * pause_s)
            await asyncio.sleep(pause_s)

    async def _look(self) -> bool:
        awaited = list(self._awaited)
        has_ended = False
        for request_id, found in zip(awaited, await summaries_of(self._broker, awaited, self._tenant), strict=True):
            future = self._awaited.get(request_id)
            if future is None or future.done() or (found is not None and found.state != REQUEST_STATE_FINISHED):
                continue
            future.set_result(found is not None)
            has_ended = True
        return has_ended


_SLICE_BYTES = 256 * 1024


class Line(NamedTuple):
    """A line that is not empty."""

    number: int
    """From 1."""
    offset: int
    """Bytes before it in the file."""
    data: bytes
    """Without its end, and without the mark of byte order that some editors write first."""


class LineTooLong(Exception):  # noqa: N818 - says what is wrong with a file
    """A line has more bytes than a request may have."""

    def __init__(self, number: int, limit_bytes: int) -> None:
        super().__init__(f"line {number} has more than {limit_bytes} bytes")
        self.number = number
        self.limit_bytes = limit_bytes


class LineReader:
    """Reads a file's lines from one of them on. It holds two slices, or the longest line."""

    def __init__(
        self, files: FileStore, tag: str, file_id: str, *, max_bytes: int, offset: int = 0, number: int = 0
    ) -> None:
        """`offset`, `number`: behind the last line that was read before."""
        self.offset = offset
        """Bytes of the lines that were returned, and of empty ones between them."""
        self._files = files
        self._tag = tag
        self._file_id = file_id
        self._max_bytes = max_bytes
        self._number = number
        self._held = bytearray()
        self._is_at_end = False

    async def next(self, most_lines: int, most_bytes: int = _SLICE_BYTES) -> list[Line]:
        """Return some of the next lines, about `most_bytes` of them; none at the end.

        Raises LineTooLong, Unavailable; a retry goes on with the same line.
        """
        lines: list[Line] = []
        num_bytes = 0
        while len(lines) < most_lines and num_bytes < most_bytes:
            end = self._held.find(b"\n")
            if end < 0 and not self._is_at_end:
                if len(self._held) > self._max_bytes:
                    raise LineTooLong(self._number + 1, self._max_bytes)
                await self._read()
                continue
            if end < 0 and not self._held:
                break
            data = bytes(self._held[:end] if end >= 0 else self._held)
            if len(data) > self._max_bytes:
                raise LineTooLong(self._number + 1, self._max_bytes)
            del self._held[: len(data) + 1]
            num_marks = len(BOM_UTF8) if not self.offset and data.startswith(BOM_UTF8) else 0
            if data[num_marks:].strip():
                text = data[num_marks:].rstrip(b"\r")
                lines.append(Line(self._number + 1, self.offset + num_marks, text))
            self._number += 1
            self.offset += len(data) + 1
            num_bytes += len(data)
        return lines

    async def _read(self) -> None:
        place = self.offset + len(self._held)
        part = await self._files.read(self._tag, self._file_id, place, _SLICE_BYTES)
        self._is_at_end = len(part) < _SLICE_BYTES
        self._held += part


MOST_PROBLEMS = 50  # that are reported
_SLICE_LINES, _SLICE_BYTES = 64, 64 * 1024  # parsed at once: about as long as a request may take in a thread


class Validation:
    """One pass over a batch's file. It is begun anew where its gateway dies."""

    def __init__(self, gateway: Gateway, api: JobApi, batch: Batch, about: BatchAbout, waits: Waits) -> None:
        self.problems: list[Problem] = []
        self.num_jobs = 0
        self._gateway = gateway
        self._api = api
        self._endpoint = about.endpoint
        self._identity = about.identity
        self._waits = waits
        self._seen: set[bytes] = set()
        self._models: dict[str, LoadedModel | None] = {}
        self._reader = LineReader(
            gateway.batches.files, batch.tag, batch.input_file_id, max_bytes=gateway.settings.limits.max_body_bytes
        )

    async def run(self) -> None:
        """Count the jobs, and collect what is wrong. Waits where Redis or the threads are busy."""
        most = self._gateway.settings.batches.max_lines
        while len(self.problems) < MOST_PROBLEMS:
            try:
                lines = await self._waits.for_success(lambda: self._reader.next(_SLICE_LINES, _SLICE_BYTES))
            except LineTooLong as error:
                self._add("line_too_long", str(error), line=error.number)
                return
            if not lines:
                break
            self.num_jobs += len(lines)
            if self.num_jobs > most:
                self._add("too_many_tasks", f"a batch may have {most} jobs, and this file has more; divide it")
                return
            await self._check(lines)
        if not self.num_jobs:
            self._add("empty_file", "the file has no line; a job in each, as JSON, is expected")

    def dumped(self) -> str:
        """Return the problems as the text that Redis keeps."""
        return json.dumps([asdict(each) for each in self.problems])

    async def _check(self, lines: Sequence[Line]) -> None:
        limits = self._gateway.settings.limits
        found = await self._waits.for_success(lambda: parsed_lines(self._gateway, self._api, self._endpoint, lines))
        checks: list[tuple[int, ParsedJob, LoadedModel]] = []
        for line, job in zip(lines, found, strict=True):
            if isinstance(job, InvalidRequest):
                self.problems.append(self._api.problem(job, line.number))
                continue
            self._check_name(job.custom_id, line.number)
            model = await self._model(job, line.number)
            if model is not None:
                checks.append((line.number, job, model))

        def work() -> list[tuple[int, ParsedJob, InvalidRequest]]:
            return [(number, job, wrong) for number, job, model in checks if (wrong := _fault(job, model, limits))]

        for number, job, wrong in await self._waits.for_success(lambda: self._gateway.pool.run(work)):
            self.problems.append(self._api.problem(wrong, number, job))
        self.problems.sort(key=lambda problem: problem.line or 0)
        del self.problems[MOST_PROBLEMS:]

    def _check_name(self, custom_id: str, line: int) -> None:
        name = hashlib.sha256(custom_id.encode("utf-8", "surrogatepass")).digest()[:16]
        if name in self._seen:
            self._add("duplicate_custom_id", f"custom_id {custom_id[:100]!r} stands in an earlier line", line)
        self._seen.add(name)

    async def _model(self, job: ParsedJob, line: int) -> LoadedModel | None:
        """Return the model of a job; None for one that its caller does not have, which is reported once."""
        name, resolve = job.draft.model, self._gateway.submission.resolve
        if name not in self._models:
            try:
                self._models[name] = await self._waits.for_success(lambda: resolve(name, self._identity))
            except (GatewayError, StreamsError) as error:
                self._models[name] = None
                self.problems.append(self._api.problem(error, line, job))
        return self._models[name]

    def _add(self, code: str, message: str, line: int | None = None) -> None:
        self.problems.append(Problem(code, message, None, line))


async def parsed_lines(
    gateway: Gateway, api: JobApi, endpoint: str, lines: Sequence[Line]
) -> list[ParsedJob | InvalidRequest]:
    """Parse lines in a thread, within the bounds of requests. Raises Overloaded."""

    def work() -> list[ParsedJob | InvalidRequest]:
        return [_parsed(gateway, api, endpoint, line.data) for line in lines]

    async with gateway.pending.hold(sum(len(line.data) for line in lines)), gateway.pending.parsing:
        return await gateway.pool.run(work)


def _parsed(gateway: Gateway, api: JobApi, endpoint: str, data: bytes) -> ParsedJob | InvalidRequest:
    try:
        job = api.parse(endpoint, data)
        checked_draft(job.draft, gateway.settings.limits)
    except InvalidRequest as error:
        return error
    return job


def _fault(job: ParsedJob, model: LoadedModel, limits: LimitSettings) -> InvalidRequest | None:
    try:
        check_parameters(job.draft, model, limits)
    except InvalidRequest as error:
        return error
    return None


_LOWEST_CLASS = max(PRIORITIES)
_KEPT_S = 60  # a job's log, once its result is in the output
_DEADLINE_MARGIN_MS = 30_000  # behind the window's end, at which the driver itself ends what still runs
_MOST_RUNS = 5  # of a job whose request Redis loses again and again
# Redis holds strings of up to 512 MiB. What is too long for the file of results has a short line among the errors.
_RESULT_FILE_BYTES, SHORT_FILE_BYTES = 480 * 2**20, 510 * 2**20


class JobRunner:
    """Runs and stops jobs of one batch. Every step waits while it is refused for a time; LeaseLost ends it."""

    def __init__(
        self,
        gateway: Gateway,
        api: JobApi,
        lease: BatchLease,
        batch: Batch,
        *,
        waits: Waits,
        rest_ms: Callable[[], int],
    ) -> None:
        """`rest_ms`: returns the milliseconds that are left of the batch's window."""
        self._gateway = gateway
        self._api = api
        self._lease = lease
        self._batch = batch
        self._about = about_of(batch.about)
        self.ends = RequestEnds(gateway.broker, self._about.identity.tenant)
        self._waits = waits
        self._rest_ms = rest_ms
        self._turn = asyncio.Lock()
        """Held while a job is submitted: where one is refused, the others wait behind it."""

    async def run(self, job: Job, data: bytes | None = None) -> None:
        """Run a job to its result; `data` is its line, None where it has to be read. One that runs already goes on."""
        line = Line(job.line, job.offset, await self._line(job) if data is None else data)
        [parsed] = await self._waits.for_success(
            lambda: parsed_lines(self._gateway, self._api, self._about.endpoint, [line])
        )
        if isinstance(parsed, InvalidRequest):  # a gateway of another version has found it valid
            await self.write(job, self._api.custom_id(line.data), self._api.refusal(parsed))
            return
        await self.write(job, parsed.custom_id, await self._result(job, parsed))

    async def stop(self, job: Job, result: JobResult) -> None:
        """End a job that was taken: with its answer where it has one, else with `result`."""
        data = await self._line(job)
        custom_id = await self._waits.for_success(lambda: self._gateway.pool.run(lambda: self._api.custom_id(data)))
        request_id = job.request_id or await self._waits.for_success(lambda: self._reserved(job))
        if request_id:
            result = await self._stopped(request_id, result)
        await self.write(job, custom_id, result)

    async def write(self, job: Job, custom_id: str, result: JobResult) -> None:
        """Write a job's line, once whoever tries."""
        if not await self._write(job, custom_id, result, _RESULT_FILE_BYTES):
            short = JobResult(0, error_json("output_too_large", "the output of the batch has no room for this result"))
            await self._write(job, custom_id, short, SHORT_FILE_BYTES)
        if result.request_id:
            await self._let_go(result.request_id)

    async def _write(self, job: Job, custom_id: str, result: JobResult, most_bytes: int) -> bool:
        file = OUTPUT if result.status == 200 else ERRORS
        line = result_line(self._batch.batch_id, job.line, custom_id, result)
        return await self._waits.for_success(
            lambda: self._lease.write_result(job, file, line, result.tokens, most_bytes=most_bytes)
        )

    async def _line(self, job: Job) -> bytes:
        batch, files = self._batch, self._gateway.batches.files
        return await self._waits.for_success(
            lambda: files.read(batch.tag, batch.input_file_id, job.offset, job.num_bytes)
        )

    # -- from line to result --

    async def _result(self, job: Job, parsed: ParsedJob) -> JobResult:
        request_id = job.request_id
        try:
            for _ in range(_MOST_RUNS):
                if not request_id:
                    request_id = await self._accepted(job, parsed)
                    noted = job._replace(request_id=request_id)
                    await self._waits.for_success(lambda: self._lease.record_request(noted))  # noqa: B023 - awaited here
                if await self.ends.wait(request_id):
                    return await self._answer(request_id)
                logger.warning("a job is lost, and runs again", extra={"request_id": request_id})
                request_id = ""
            raise RequestNotFound(job.request_id)
        except LeaseLost:
            raise
        except (GatewayError, StreamsError) as error:
            return self._api.refusal(error, parsed, request_id)
        except Exception as error:  # a defect must not hold up the other jobs
            logger.exception("a job failed", extra={"request_id": request_id, "batch_id": self._batch.batch_id})
            return self._api.refusal(error, parsed, request_id)

    async def _accepted(self, job: Job, parsed: ParsedJob) -> str:
        """Have a job accepted; return the id of what runs, which a try before this one may have begun."""
        call = self._gateway.calls.begin("batches", "", {})
        call.identified(self._about.identity)
        outcome = DISCONNECTED
        try:
            async with self._turn:
                spec = await self._waits.for_success(
                    lambda: self._gateway.submission.submit(self._draft(job, parsed), self._about.identity, call)
                )
            outcome = OK
        except Exception as error:
            outcome = self._api.code(error)
            raise
        finally:
            call.end(outcome)
        return spec.request_id

    def _draft(self, job: Job, parsed: ParsedJob) -> Draft:
        draft = parsed.draft
        return replace(
            draft,
            priority=_LOWEST_CLASS,
            on_disconnect=ON_DISCONNECT_CONTINUE,
            deadline_ms=_DEADLINE_MARGIN_MS + max(0, self._rest_ms()),
            idempotency_key=self._key(job),
            body_digest=self._batch.batch_id,
            is_listed=False,
            client_request_id=draft.client_request_id or parsed.custom_id,
        )

    def _key(self, job: Job) -> str:
        return f"{self._batch.batch_id}/{job.line}"

    async def _answer(self, request_id: str) -> JobResult:
        return await self._waits.for_success(lambda: self._api.answer(request_id, self._about.identity))

    # -- the end of a job that is not to go on --

    async def _reserved(self, job: Job) -> str:
        connection, tenant = self._gateway.broker.connection, self._about.identity.tenant
        return await reserved_id(connection, tenant, self._key(job)) or ""

    async def _stopped(self, request_id: str, result: JobResult) -> JobResult:
        """End a request; return its answer where it had ended before, else `result`."""
        tenant = self._about.identity.tenant
        try:
            reason = await self._waits.for_success(lambda: self._gateway.requests.cancel(request_id, tenant))
            if reason in (FINISH_REASON_CANCELLED, FINISH_REASON_DEADLINE):
                return result
            return await self._answer(request_id)
        except RequestNotFound:
            return result
        except (GatewayError, StreamsError) as error:
            return self._api.refusal(error, None, request_id)

    async def _let_go(self, request_id: str) -> None:
        """Keep the log of a job no longer than it is of use: thousands of them would fill Redis' memory."""
        try:
            await self._gateway.limit.wait(shorten_log(self._gateway.broker, request_id, _KEPT_S))
        except StreamsError as error:
            logger.info("a job's log is kept for as long as others: %s", error, extra={"request_id": request_id})
            return
        self._gateway.submission.session.quota.note_ended(self._about.identity.tenant, request_id)


def error_json(code: str, message: str) -> bytes:
    """Return the `error` of a line whose job has no answer."""
    return json.dumps({"code": code, "message": message}).encode()


def result_line(batch_id: str, line: int, custom_id: str, result: JobResult) -> bytes:
    """Return a line of a batch's output or errors, in OpenAI's form."""
    head = {"id": f"batch_req_{batch_id.removeprefix('batch_')}_{line}", "custom_id": custom_id}
    shown = json.dumps(head)[:-1].encode()
    if not result.status:
        return shown + b', "response": null, "error": ' + result.body + b"}\n"
    answer = json.dumps({"status_code": result.status, "request_id": result.request_id})[:-1].encode()
    return shown + b', "response": ' + answer + b', "body": ' + result.body + b'}, "error": null}\n'
