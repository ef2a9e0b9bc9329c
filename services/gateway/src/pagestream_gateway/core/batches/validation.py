"""Check all lines of a batch before any of them runs."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from pagestream_batches.batches import Batch
from pagestream_streams.errors import StreamsError

from pagestream_gateway.core.batches.about import BatchAbout
from pagestream_gateway.core.batches.job_api import JobApi, ParsedJob, Problem
from pagestream_gateway.core.batches.lines import Line, LineReader, LineTooLong
from pagestream_gateway.core.batches.waiting import Waits
from pagestream_gateway.core.drafts import check_draft
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.core.models import LoadedModel
from pagestream_gateway.core.preparation import check_parameters
from pagestream_gateway.errors import GatewayError, InvalidRequest
from pagestream_gateway.settings import LimitSettings

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
        check_draft(job.draft, gateway.settings.limits)
    except InvalidRequest as error:
        return error
    return job


def _fault(job: ParsedJob, model: LoadedModel, limits: LimitSettings) -> InvalidRequest | None:
    try:
        check_parameters(job.draft, model, limits)
    except InvalidRequest as error:
        return error
    return None
