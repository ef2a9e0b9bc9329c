"""Files and batches in Redis: parts once, results once, one driver at a time, and nothing left behind."""

import pytest
from pagestream_batches import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    ERRORS,
    FINALIZING,
    IN_PROGRESS,
    OUTPUT,
    VALIDATING,
    ActiveBatch,
    Batch,
    BatchesFull,
    BatchGone,
    BatchLease,
    BatchNotFound,
    BatchRegistry,
    FileBounds,
    FileInUse,
    FileNotFound,
    FilePurposeDiffers,
    FilesFull,
    FileStore,
    FileTooLarge,
    Job,
    LeaseHeld,
    LeaseLost,
    Tokens,
    new_file_id,
    sweep,
)
from pagestream_streams import Broker
from pagestream_streams.protocol import tenant_tag
from support.redis.topologies import Place, find_keys

pytestmark = pytest.mark.served

OURS, OTHERS = "ours", "others"
BOUNDS = FileBounds(file_bytes=100, tenant_bytes=150, all_bytes=180, num_files=3)
ANY = 10**6
JOBS = [Job(1, 0, 4), Job(2, 5, 4)]
INPUT = b"aaaa\nbbbb\n"


@pytest.fixture
def files(broker: Broker) -> FileStore:
    return FileStore(broker.connection, BOUNDS)


@pytest.fixture
def registry(broker: Broker) -> BatchRegistry:
    return BatchRegistry(broker.connection, most_batches=2)


async def stored(files: FileStore, data: bytes, tenant: str = OURS, *, purpose: str = "batch", s: int = 3600) -> str:
    file_id = await files.create(tenant, 60_000)
    await files.append(tenant, file_id, 0, data)
    await files.complete(tenant, file_id, name="a", purpose=purpose, lifetime_s=s)
    return file_id


async def leased(broker: Broker, batch: Batch, lease_ms: int = 60_000) -> BatchLease:
    lease = BatchLease(broker.connection, ActiveBatch(batch.tag, batch.batch_id), lease_ms=lease_ms)
    await lease.acquire()
    return lease


async def advance(lease: BatchLease, before: str, status: str, **fields: str | int) -> bool:
    return await lease.change_status(before, status, lifetime_s=3600, batch_lifetime_s=3600, **fields)


async def running(broker: Broker, files: FileStore, registry: BatchRegistry) -> tuple[Batch, BatchLease]:
    batch = await registry.create(OURS, await stored(files, INPUT), about="{}", window_s=60)
    lease = await leased(broker, batch)
    await advance(lease, VALIDATING, IN_PROGRESS, total=2, output=new_file_id(), errors=new_file_id())
    return batch, lease


async def test_a_part_is_appended_once(files: FileStore) -> None:
    file_id = await files.create(OURS, 60_000)
    for offset, part in ((0, b"one"), (0, b"one"), (3, b"two"), (3, b"two")):
        await files.append(OURS, file_id, offset, part)
    with pytest.raises(FileNotFound):
        await files.append(OURS, file_id, 9, b"behind a gap")
    with pytest.raises(FileNotFound):
        await files.get(OURS, file_id)
    made = await files.complete(OURS, file_id, name="a", purpose="batch", lifetime_s=60)
    assert (made.num_bytes, await files.read(tenant_tag(OURS), file_id, 0, 100)) == (6, b"onetwo")
    with pytest.raises(FileNotFound):
        await files.append(OURS, file_id, 6, b"later")
    with pytest.raises(FileNotFound):
        await files.get(OTHERS, file_id)


async def test_bounds_are_of_a_file_a_tenant_and_all(files: FileStore, redis_server: Place) -> None:
    file_id = await files.create(OURS, 60_000)
    with pytest.raises(FileTooLarge):
        await files.append(OURS, file_id, 0, b"x" * 101)
    await files.append(OURS, file_id, 0, b"x" * 100)
    second = await files.create(OURS, 60_000)
    with pytest.raises(FilesFull, match="of a tenant may have 150 bytes"):
        await files.append(OURS, second, 0, b"x" * 51)
    other = await files.create(OTHERS, 60_000)
    with pytest.raises(FilesFull, match="all files"):
        await files.append(OTHERS, other, 0, b"x" * 90)
    await files.abandon(OTHERS, other)
    await files.create(OURS, 60_000)
    with pytest.raises(FilesFull, match="3 files"):
        await files.create(OURS, 60_000)
    await files.abandon(OURS, file_id)
    await stored(files, b"x" * 100, OTHERS)


async def test_what_has_expired_is_swept_with_its_bytes(broker: Broker, files: FileStore, redis_server: Place) -> None:
    await stored(files, b"x" * 90, s=0)
    kept = await stored(files, b"y" * 20)
    await files.create(OTHERS, 0)
    await sweep(broker.connection)
    page = await files.page(OURS, limit=10, after="", purpose="", newest_first=True)
    assert [file.file_id for file in page.files] == [kept]
    await files.delete(OURS, kept)
    await sweep(broker.connection)
    left = {key.rpartition(b":")[2] for key in find_keys(redis_server, "ps:batches:*")}
    assert left <= {b"held", b"files", b"expiries"} | {key for key in left if key.startswith(b"file-")}
    assert await broker.connection.execute("HGET", "ps:stored-bytes", "") == b"0"


async def test_one_driver_at_a_time(broker: Broker, files: FileStore, registry: BatchRegistry) -> None:
    batch, first = await running(broker, files, registry)
    with pytest.raises(LeaseHeld):
        await leased(broker, batch)
    await first.release()
    second = await leased(broker, batch)
    for step in (
        first.renew(""),
        first.start_jobs(JOBS, 10, room_bytes=0),
        first.record_request(JOBS[0]),
        first.write_result(JOBS[0], OUTPUT, b"x\n", Tokens(), most_bytes=ANY),
        advance(first, IN_PROGRESS, FINALIZING),
    ):
        with pytest.raises(LeaseLost):
            await step
    found, now_ms = await second.renew("queue_full")
    assert (found.status, found.waits_for, found.total) == (IN_PROGRESS, "queue_full", 2)
    assert 0 < found.times_ms["expires"] - now_ms <= 60_000


async def test_each_job_has_one_line(broker: Broker, files: FileStore, registry: BatchRegistry) -> None:
    """Whatever is repeated, here and by the next driver."""
    batch, lease = await running(broker, files, registry)
    for _ in range(2):
        assert await lease.start_jobs(JOBS, 10, room_bytes=0)
    noted = JOBS[0]._replace(request_id="r")
    await lease.record_request(noted)
    await lease.release()
    lease = await leased(broker, batch)
    assert await lease.unfinished_jobs() == [noted, JOBS[1]]
    for _ in range(2):
        assert await lease.write_result(noted, OUTPUT, b"one\n", Tokens(3, 2, 1), most_bytes=ANY)
        await lease.record_request(noted)
        assert await lease.start_jobs(JOBS, 10, room_bytes=0)
    assert not await lease.write_result(JOBS[1], ERRORS, b"two\n", Tokens(), most_bytes=3)
    await lease.write_results([(JOBS[1], b"two\n")] * 2, ERRORS, most_bytes=ANY)
    assert await lease.unfinished_jobs() == []
    assert not await lease.start_jobs([Job(3, 10, 1)], 12, room_bytes=len(INPUT)), "no room"
    with pytest.raises(FileInUse):
        await files.delete(OURS, batch.input_file_id)
    for before, status in ((IN_PROGRESS, FINALIZING), (FINALIZING, COMPLETED), (FINALIZING, COMPLETED)):
        assert await advance(lease, before, status)
    ended = await registry.get(OURS, batch.batch_id)
    assert (ended.completed, ended.failed, ended.tokens) == (1, 1, Tokens(3, 2, 1))
    for name, line in ((OUTPUT, b"one\n"), (ERRORS, b"two\n")):
        file = await files.get(OURS, ended.file_ids[name])
        assert (file.purpose, file.num_bytes) == ("batch_output", 4)
        assert await files.read(batch.tag, file.file_id, 0, 100) == line
    with pytest.raises(BatchGone):
        await leased(broker, batch)
    await files.delete(OURS, batch.input_file_id)


async def test_lines_that_overlap_with_those_taken_before_are_taken_once(
    broker: Broker, files: FileStore, registry: BatchRegistry
) -> None:
    """A driver may read lines again that it took a moment before: its step was cancelled before the reply came."""
    batch, lease = await running(broker, files, registry)
    assert await lease.start_jobs(JOBS[:1], 5, room_bytes=0)
    assert await lease.write_result(JOBS[0], OUTPUT, b"one\n", Tokens(), most_bytes=ANY)
    assert await lease.start_jobs(JOBS, 10, room_bytes=0)
    assert await lease.unfinished_jobs() == [JOBS[1]]
    found = await registry.get(OURS, batch.batch_id)
    assert (found.offset, found.line) == (10, 2)
    assert await lease.start_jobs([JOBS[1]], 12, room_bytes=0), "empty lines may follow"
    assert (await registry.get(OURS, batch.batch_id)).offset == 12


async def test_a_cancel_stops_every_step_but_the_last(
    broker: Broker, files: FileStore, registry: BatchRegistry
) -> None:
    batch, lease = await running(broker, files, registry)
    assert (await registry.cancel(OURS, batch.batch_id)).status == CANCELLING
    assert not await advance(lease, IN_PROGRESS, FINALIZING)
    assert await advance(lease, CANCELLING, CANCELLED)
    ended = await registry.get(OURS, batch.batch_id)
    assert (ended.status, ended.file_ids) == (CANCELLED, {})
    with pytest.raises(BatchNotFound):
        await registry.cancel(OTHERS, batch.batch_id)


async def test_batches_are_bounded_and_need_their_file(
    broker: Broker, files: FileStore, registry: BatchRegistry
) -> None:
    file_id = await stored(files, INPUT)
    with pytest.raises(FileNotFound):
        await registry.create(OTHERS, file_id, about="", window_s=60)
    with pytest.raises(FilePurposeDiffers):
        await registry.create(OURS, await stored(files, b"", purpose="batch_output"), about="", window_s=60)
    made = [await registry.create(OURS, file_id, about="", window_s=60) for _ in range(2)]
    with pytest.raises(BatchesFull):
        await registry.create(OURS, file_id, about="", window_s=60)
    assert [each.batch_id for each in await registry.active()] == [each.batch_id for each in made]
    await advance(await leased(broker, made[0]), VALIDATING, "failed", problems="[]")
    third = await registry.create(OURS, file_id, about="", window_s=60)
    page = await registry.page(OURS, limit=1, after="")
    assert (page.batches[0].batch_id, page.has_more) == (third.batch_id, True)
    rest = await registry.page(OURS, limit=5, after=third.batch_id)
    assert ([each.batch_id for each in rest.batches], rest.has_more) == ([made[1].batch_id], False)


async def test_a_driver_that_is_silent_loses_its_batch(
    broker: Broker, files: FileStore, registry: BatchRegistry
) -> None:
    batch = await registry.create(OURS, await stored(files, INPUT), about="", window_s=60)
    lease = await leased(broker, batch, lease_ms=1)
    while True:
        try:
            second = await leased(broker, batch)
        except LeaseHeld:
            continue
        break
    with pytest.raises(LeaseLost):
        await lease.renew("")
    await second.renew("")
