"""Find batches without a driver, and drive each from status to status for as long as this process has its lease."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence

from pagestream_batches.batches import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    ERRORS,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    ActiveBatch,
    Batch,
    BatchGone,
    BatchLease,
    Job,
    LeaseHeld,
    LeaseLost,
)
from pagestream_batches.files import all_bytes, new_file_id, sweep
from pagestream_streams.errors import StreamsError, Unavailable
from pagestream_streams.tasks import Periodic, cancel, raise_if_cancelled, wait_for_event

from pagestream_gateway.batches.jobs import (
    SHORT_FILE_BYTES,
    JobApi,
    JobResult,
    JobRunner,
    Line,
    LineReader,
    Validation,
    Waits,
    about_of,
    error_json,
    result_line,
)
from pagestream_gateway.gateway import Gateway

logger = logging.getLogger(__name__)
_BEATS = 4  # renewals in a lease
_ROOM_WAIT_S = 2.0  # until room for output is looked for again
_STOPPED_AT_ONCE = 16
_UNRUN_LINES = 200  # written at once for jobs that did not run
_UNRUN = {
    EXPIRED: ("batch_expired", "the batch's completion window ended before this job had its result"),
    CANCELLED: ("batch_cancelled", "the batch was cancelled before this job had its result"),
}


class BatchDriver:
    """Everything that it knows is in Redis: where it dies, another one goes on."""

    def __init__(self, gateway: Gateway, api: JobApi, lease: BatchLease, batch: Batch, now_ms: int) -> None:
        """`batch`, `now_ms`: what taking the lease has returned."""
        self._gateway = gateway
        self._settings = gateway.settings.batches
        self._api = api
        self._lease = lease
        self._batch = batch
        self._about = about_of(batch.about)
        self._waits = Waits(api)
        self._note_time(now_ms)

    async def run(self) -> None:
        """Drive the batch to its end. Raises LeaseLost."""
        while not self._batch.has_ended:
            phase = asyncio.create_task(self._phase(), name=f"batch {self._batch.status}")
            try:
                await self._until_changed(phase)
            finally:
                await cancel(phase)
        counts = {name: getattr(self._batch, name) for name in ("total", "completed", "failed")}
        logger.info("batch ended", extra={"batch_id": self._batch.batch_id, "status": self._batch.status, **counts})

    async def _until_changed(self, phase: asyncio.Task[None]) -> None:
        """Renew the lease until the phase has ended, or another one is due."""
        status, is_late = self._batch.status, self._is_late
        while True:
            await asyncio.wait({phase}, timeout=self._settings.lease_s / _BEATS)
            if phase.done():
                phase.result()
                self._batch = await self._waits.for_success(self._read)
                return
            try:
                self._batch, now_ms = await self._lease.renew(self._waits.reason)
            except Unavailable as error:
                logger.info("a batch's lease is not renewed now: %s", error)
                continue
            self._note_time(now_ms)
            if self._batch.status != status or self._is_late != is_late:
                return

    async def _read(self) -> Batch:
        return await self._gateway.batches.registry.get(self._about.identity.tenant, self._batch.batch_id)

    async def _phase(self) -> None:
        status = self._batch.status
        if status == CANCELLING:
            await self._stop(CANCELLED)
        elif status == FINALIZING:
            await self._advance(COMPLETED)
        elif self._is_late:
            await self._stop(EXPIRED)
        elif status == VALIDATING:
            await self._validate()
        elif status == IN_PROGRESS:
            await self._run_jobs()

    async def _advance(self, status: str, **fields: str | int) -> None:
        """Bring the batch to another status, unless it was cancelled meanwhile."""
        await self._waits.for_success(
            lambda: self._lease.change_status(
                self._batch.status,
                status,
                lifetime_s=self._about.output_lifetime_s,
                batch_lifetime_s=max(self._settings.file_lifetime_s, self._about.output_lifetime_s),
                **fields,
            )
        )

    # -- phases --

    async def _validate(self) -> None:
        validation = Validation(self._gateway, self._api, self._batch, self._about, self._waits)
        await validation.run()
        if validation.problems:
            await self._advance(FAILED, problems=validation.dumped())
            return
        await self._advance(IN_PROGRESS, total=validation.num_jobs, output=new_file_id(), errors=new_file_id())

    async def _run_jobs(self) -> None:
        runner, reader = self._runner(), self._reader()
        running: set[asyncio.Task[None]] = set()
        ends = asyncio.create_task(runner.ends.run(), name="ends of a batch's jobs")
        try:
            for job in await self._waits.for_success(self._lease.unfinished_jobs):
                running.add(asyncio.create_task(runner.run(job)))
            while True:
                free = self._settings.jobs_in_flight - len(running)
                lines = await self._next(reader, free) if free > 0 else []
                taken = await self._taken(lines, reader.offset, running)
                running |= {
                    asyncio.create_task(runner.run(job, line.data)) for job, line in zip(taken, lines, strict=True)
                }
                if not running:
                    break
                done, running = await asyncio.wait({*running, ends}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                running.discard(ends)
        finally:
            await asyncio.gather(*map(cancel, (*running, ends)), return_exceptions=True)
        await self._advance(FINALIZING)

    async def _taken(self, lines: Sequence[Line], offset: int, running: set[asyncio.Task[None]]) -> list[Job]:
        """Take lines as jobs, once the files of the tenant, and of all, leave room for their output."""
        jobs = [Job(line.number, line.offset, len(line.data)) for line in lines]

        async def take() -> bool:
            if await all_bytes(self._gateway.broker.connection) >= self._settings.max_bytes:
                return False
            return await self._lease.start_jobs(jobs, offset, room_bytes=self._settings.max_tenant_bytes)

        while jobs and not await self._waits.for_success(take):
            with self._waits.shown("files_full"):
                await asyncio.wait(running, timeout=_ROOM_WAIT_S) if running else await asyncio.sleep(_ROOM_WAIT_S)
        return jobs

    async def _stop(self, status: str) -> None:
        """End the jobs in flight, and write a line for each job that has no result."""
        if IN_PROGRESS in self._batch.times_ms:
            code, message = _UNRUN[status]
            result = JobResult(0, error_json(code, message))
            runner, turns = self._runner(), asyncio.Semaphore(_STOPPED_AT_ONCE)

            async def stop(job: Job) -> None:
                async with turns:
                    await runner.stop(job, result)

            async with asyncio.TaskGroup() as tasks:
                for job in await self._waits.for_success(self._lease.unfinished_jobs):
                    tasks.create_task(stop(job))
            reader = self._reader()
            while lines := await self._next(reader, _UNRUN_LINES):
                await self._write_unrun(lines, reader.offset, result)
        await self._advance(status)

    async def _write_unrun(self, lines: Sequence[Line], offset: int, result: JobResult) -> None:
        jobs = [Job(line.number, line.offset, len(line.data)) for line in lines]
        names = await self._waits.for_success(
            lambda: self._gateway.pool.run(lambda: [self._api.custom_id(line.data) for line in lines])
        )
        written = [
            (job, result_line(self._batch.batch_id, job.line, name, result))
            for job, name in zip(jobs, names, strict=True)
        ]
        await self._waits.for_success(lambda: self._lease.start_jobs(jobs, offset, room_bytes=0))
        await self._waits.for_success(lambda: self._lease.write_results(written, ERRORS, most_bytes=SHORT_FILE_BYTES))

    # -- parts of phases --

    def _runner(self) -> JobRunner:
        return JobRunner(self._gateway, self._api, self._lease, self._batch, waits=self._waits, rest_ms=self._rest_ms)

    def _reader(self) -> LineReader:
        batch = self._batch
        return LineReader(
            self._gateway.batches.files,
            batch.tag,
            batch.input_file_id,
            max_bytes=self._gateway.settings.limits.max_body_bytes,
            offset=batch.offset,
            number=batch.line,
        )

    async def _next(self, reader: LineReader, most_lines: int) -> list[Line]:
        return await self._waits.for_success(lambda: reader.next(most_lines))

    # -- Redis' clock --

    def _note_time(self, now_ms: int) -> None:
        self._behind_ms = now_ms - time.monotonic() * 1000

    def _rest_ms(self) -> int:
        """Return what is left of the batch's window."""
        return round(self._batch.times_ms["expires"] - time.monotonic() * 1000 - self._behind_ms)

    @property
    def _is_late(self) -> bool:
        return self._rest_ms() <= 0


_LOOK_S = 1.0  # one short command of Redis
_SWEEP_S = 60.0  # how late what has expired may go
_UNKNOWN_S = 60  # a batch's name stands in Redis before the batch; after so long its creator has died
_GIVE_BACK_S = 1.0
_HELD_S = 2.0  # for which another's lease is believed: it may give it back
_AFTER_DEFECT_S = 30.0  # a batch that was given up because of a defect is left to others for so long


class BatchDispatcher:
    """The batches that this process drives. Call `start`, then `stop`, which leaves them to others at once."""

    def __init__(self, gateway: Gateway, api: JobApi) -> None:
        self._gateway = gateway
        self._settings = gateway.settings.batches
        self._api = api
        self._driven: dict[str, asyncio.Task[None]] = {}
        self._tags: dict[str, str] = {}
        self._not_before: dict[str, float] = {}  # by name, on time.monotonic()
        self._task: asyncio.Task[None] | None = None
        connection = gateway.broker.connection
        self._sweeper = Periodic("files that have expired", _SWEEP_S, lambda: sweep(connection))

    def start(self) -> None:
        """Look for batches from now on."""
        self._sweeper.start()
        self._task = asyncio.create_task(self._run(), name="batches")

    async def stop(self) -> None:
        """Stop driving, and give the leases back."""
        await self._sweeper.stop()
        if self._task is not None:
            await cancel(self._task)
        await asyncio.gather(*map(cancel, self._driven.values()))

    async def _run(self) -> None:
        changed = self._gateway.batches.changed
        while True:
            changed.clear()
            try:
                await self._look()
            except Unavailable as error:
                logger.info("batches are not looked for now: %s", error)
            except asyncio.CancelledError:
                raise_if_cancelled()
                logger.exception("the look for batches was cancelled from inside; the next look follows")
            except Exception:
                logger.exception("batches were not looked for; the next look follows")
            await wait_for_event(changed, _LOOK_S)

    async def _look(self) -> None:
        registry, now = self._gateway.batches.registry, time.monotonic()
        self._not_before = {name: until for name, until in self._not_before.items() if until > now}
        if len(self._driven) >= self._settings.driven:
            return
        for active in self._in_turn(await registry.active()):
            if len(self._driven) >= self._settings.driven:
                return
            lease = BatchLease(registry.connection, active, lease_ms=round(self._settings.lease_s * 1000))
            try:
                batch, now_ms = await lease.acquire()
            except LeaseHeld as held:
                self._not_before[active.member] = time.monotonic() + min(held.rest_ms / 1000, _HELD_S)
            except BatchGone as gone:
                await registry.remove_active(active, least_age_s=_UNKNOWN_S if gone.is_missing else 0)
            else:
                self._drive(active, lease, batch, now_ms)

    def _in_turn(self, batches: Sequence[ActiveBatch]) -> list[ActiveBatch]:
        """Return the batches that may be tried, so that each tenant has its turn, and of each the oldest first."""
        counts = Counter(self._tags.values())
        ranked: list[tuple[int, ActiveBatch]] = []
        for active in batches:
            if active.member in self._driven or active.member in self._not_before:
                continue
            ranked.append((counts[active.tag], active))
            counts[active.tag] += 1
        ranked.sort(key=lambda each: each[0])
        return [active for _, active in ranked]

    def _drive(self, active: ActiveBatch, lease: BatchLease, batch: Batch, now_ms: int) -> None:
        name = active.member
        task = self._driven[name] = asyncio.create_task(self._driving(active, lease, batch, now_ms), name=name)
        self._tags[name] = active.tag

        def end(_: asyncio.Task[None]) -> None:
            self._driven.pop(name, None)
            self._tags.pop(name, None)
            self._gateway.batches.changed.set()  # there is room for another one

        task.add_done_callback(end)

    async def _driving(self, active: ActiveBatch, lease: BatchLease, batch: Batch, now_ms: int) -> None:
        try:
            await BatchDriver(self._gateway, self._api, lease, batch, now_ms).run()
            await self._gateway.batches.registry.remove_active(active)
        except LeaseLost as error:
            logger.info("another process drives a batch: %s", error)
        except StreamsError as error:
            logger.warning("a batch is left to others: %s", error, extra={"batch_id": active.batch_id})
        except asyncio.CancelledError:
            await self._give_back(lease)
            raise
        except Exception:
            logger.exception("a batch is left to others", extra={"batch_id": active.batch_id})
            self._not_before[active.member] = time.monotonic() + _AFTER_DEFECT_S

    async def _give_back(self, lease: BatchLease) -> None:
        try:
            async with asyncio.timeout(_GIVE_BACK_S):
                await lease.release()
        except (TimeoutError, Unavailable) as error:
            logger.info("a batch's lease lapses by itself: %s", error)
