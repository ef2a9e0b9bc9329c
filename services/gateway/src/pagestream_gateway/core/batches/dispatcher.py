"""Finds batches that nobody drives, and drives some of them in this process."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence

from pagestream_batches.batches import ActiveBatch, Batch, BatchLease, Gone, Held, LeaseLost
from pagestream_batches.files import sweep
from pagestream_streams.errors import StreamsError, Unavailable
from pagestream_streams.tasks import Periodic, cancel, raise_if_cancelled, wait_for_event

from pagestream_gateway.core.batches.driver import BatchDriver
from pagestream_gateway.core.batches.job_api import JobApi
from pagestream_gateway.core.gateway import Gateway

logger = logging.getLogger(__name__)
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
                batch, now_ms = await lease.take()
            except Held as held:
                self._not_before[active.member] = time.monotonic() + min(held.rest_ms / 1000, _HELD_S)
            except Gone as gone:
                await registry.forget(active, least_age_s=_UNKNOWN_S if gone.is_missing else 0)
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
            await self._gateway.batches.registry.forget(active)
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
                await lease.give_back()
        except (TimeoutError, Unavailable) as error:
            logger.info("a batch's lease lapses by itself: %s", error)
