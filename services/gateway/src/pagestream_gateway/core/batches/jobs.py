"""The jobs of a batch: each goes from its line to its result."""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace

from pagestream.v1.inference_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_DEADLINE, ON_DISCONNECT_CONTINUE
from pagestream_batches.batches import ERRORS, OUTPUT, Batch, BatchLease, Job, LeaseLost, shorten_log
from pagestream_streams.errors import RequestNotFound, StreamsError
from pagestream_streams.gateway.accept import reserved_id

from pagestream_gateway.core.batches.about import about_of
from pagestream_gateway.core.batches.ends import RequestEnds
from pagestream_gateway.core.batches.job_api import JobApi, JobResult, ParsedJob
from pagestream_gateway.core.batches.lines import Line
from pagestream_gateway.core.batches.validation import parsed_lines
from pagestream_gateway.core.batches.waiting import Waits
from pagestream_gateway.core.calls import DISCONNECTED, OK
from pagestream_gateway.core.drafts import Draft
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.errors import GatewayError, InvalidRequest
from pagestream_gateway.settings import PRIORITIES

logger = logging.getLogger(__name__)
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
            lambda: self._lease.finish(job, file, line, result.tokens, most_bytes=most_bytes)
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
                    await self._waits.for_success(lambda: self._lease.note(noted))  # noqa: B023 - awaited here
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
