"""A storm of kills that is no request's fault quarantines nothing, however often it hits a request at one index."""

import asyncio
import random
from collections.abc import Sequence

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_STOP
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams import AppendKind, Broker, Claim, EngineSession, GatewaySession, expire_engine
from pagestream_streams.tasks import cancel
from support.protocol.token_streams import MODEL, TENANT, Worker, ending, numbers, read_all, spec, tokens

NUM_TOKENS = 6
NUM_REQUESTS = 8
STEP_S = 0.03
LEAST_KILLS = 20
STORM_LIMIT_S = 60.0  # a busy machine starts engines slowly
READ_LIMIT_S = 90.0  # the storm, and what is left after it


class Slot:
    """A place where one engine runs after the other, each until it is killed."""

    def __init__(self, broker: Broker, name: str, chance: random.Random) -> None:
        self.broker, self.name, self.chance = broker, name, chance
        self.kills = 0
        self.runs_alone = 0
        self._dying: EngineSession | None = None

    async def run(self, storm_ends: asyncio.Event) -> None:
        """Engines live for a few steps at most during the storm; the last one lives on."""
        while True:
            session = EngineSession(self.broker, model=MODEL, engine_id=self.name, on_lost=lambda _: None)
            await session.__aenter__()
            life = asyncio.create_task(self._serve(Worker(session)))
            stormy = asyncio.create_task(storm_ends.wait())
            try:
                # Shorter than a step at times: the same index is hit again and again.
                await asyncio.wait([stormy], timeout=self.chance.uniform(0.3, 3) * STEP_S)
                if stormy.done():
                    await life
                    return
            finally:
                stormy.cancel()
                self._dying = session
                await cancel(life)
            await self.bury()
            self.kills += 1
            await expire_engine(self.broker, session.engine_id)

    async def bury(self) -> None:
        """What a killed process takes with it, and does not end."""
        if self._dying is not None:
            for part in (self._dying.heartbeat, self._dying.sweeper, self._dying.subscription):
                await part.stop()

    async def _serve(self, engine: Worker) -> None:
        claims: list[tuple[Claim, int, str]] = []
        while True:
            found = await engine.session.claim(max_requests=4 - len(claims), max_prompt_tokens=1000)
            self.runs_alone += any(claim.isolated for claim in found)
            claims += [(claim, claim.next_index, claim.digest) for claim in found]
            await engine.session.mark(running=[claim.request_id for claim, _, _ in claims])
            await asyncio.sleep(STEP_S)
            claims = [stepped for each in claims if (stepped := await self._step(engine, *each)) is not None]

    async def _step(self, engine: Worker, claim: Claim, index: int, digest: str) -> tuple[Claim, int, str] | None:
        entries = tokens([100 + index], digest) if index < NUM_TOKENS else ending(digest, count=NUM_TOKENS)
        outcome = await engine.append(claim, index, entries)
        assert outcome.kind in (AppendKind.OK, AppendKind.FENCED)
        if outcome.lost or entries[-1].HasField("end"):
            return None
        return claim, index + 1, entries[-1].digest


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("num_slots", [1, 3])
async def test_nothing_is_quarantined(broker: Broker, num_slots: int) -> None:
    chance = random.Random(num_slots)
    requests: Sequence[RequestSpec] = [spec(partition=number % 2) for number in range(NUM_REQUESTS)]
    async with GatewaySession(broker) as gateway:
        for request in requests:
            await gateway.accept(request)
        slots = [Slot(broker, f"slot-{number}", chance) for number in range(num_slots)]
        storm_ends = asyncio.Event()
        running = [asyncio.create_task(slot.run(storm_ends)) for slot in slots]
        reading = [
            asyncio.create_task(read_all(gateway, request.request_id, limit_s=READ_LIMIT_S)) for request in requests
        ]
        try:
            await asyncio.wait([*running, *reading], timeout=8, return_when=asyncio.FIRST_EXCEPTION)
            async with asyncio.timeout(STORM_LIMIT_S):
                while sum(slot.kills for slot in slots) < LEAST_KILLS:
                    await asyncio.wait(running, timeout=0.1)
            storm_ends.set()
            logs = await asyncio.gather(*reading)
        finally:
            for task in running:
                await cancel(task)
            for slot in slots:
                await slot.bury()
        for request, entries in zip(requests, logs, strict=True):
            assert numbers(entries) == list(range(100, 100 + NUM_TOKENS))
            assert (await broker.view(request.request_id, TENANT)).finish_reason == FINISH_REASON_STOP
        assert await broker.quarantined(MODEL) == []
    # How many were suspected is a matter of chance and of the machine's load; test_poison.py has the certain cases.
    print(f"{sum(slot.kills for slot in slots)} kills, {sum(slot.runs_alone for slot in slots)} runs alone")
