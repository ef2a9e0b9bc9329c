"""A deployment whose every process can be killed, stopped and cut off from Redis by a proxy of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import httpx
from pagestream.v1.records_pb2 import Adapter
from pagestream_streams import Broker, StreamsError, expire_engine, find_server, server_command
from pagestream_streams.admin import adapter_revision
from pagestream_streams.fault_points import VARIABLE
from redis import Redis
from support.faults.fault_points import FaultPointController
from support.faults.feature_clients import FeatureClient, Transcript, clients_of
from support.faults.feature_rows import FEATURE_ROWS, FeatureRow
from support.faults.parts import RankPart
from support.faults.setups import ENGINE_OPTIONS, SETUPS, Engines, write_adapter, write_other_model
from support.network.proxy import Proxy
from support.processes.fork_server import ForkedPart, ForkServer
from support.processes.part import Part, StackError
from support.processes.stack import DEMO_MODEL, free_port
from support.processes.waiting import LIMIT_S, descendants_of

MODEL = "demo"
ADAPTER, OTHER_MODEL = "adapter", "other"
NUM_ENGINES = NUM_GATEWAYS = 2
TENANT = "default"
MODULES = ("pagestream_worker.process", "pagestream_gateway.__main__", "transformers.models.llama")
TEXTS_DTYPE = "float32"
"""In which the answers have the stop strings of their rows; in another one no row's finish is known beforehand."""
READY_LIMIT_S = 240.0
POLL_S = 0.05
PAST_LEASE_S = 2.6
"""A lease (1.5 s) and the time until a sweep finds that it has lapsed."""
IDLE_S = 4.0
"""Longer than a group waits for a rank without progress (1.5 s), and for its end."""
PAST_GRACE_S = 13.0
"""The disconnect grace (10 s) and the time until a sweep would find that it is over."""


class Fault(StrEnum):
    """What is injected into a part."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    CUT = "network cut"
    FILL = "memory limit"
    """Redis is at its memory limit, and every client has to reconnect meanwhile."""


@dataclass
class Member:
    """A part and its proxies to Redis (and, for a gateway, to its clients)."""

    part: Part
    proxies: Sequence[Proxy]
    addresses: dict[str, str]
    """A gateway's address for each API."""

    @property
    def name(self) -> str:
        """Name of the part."""
        return self.part.name

    @property
    def pid(self) -> int:
        """Id of the process that runs now; 0 without one."""
        return self.part.pid


class FaultCluster:
    """Two engines, two gateways, one Redis. Made by `running_cluster`."""

    def __init__(
        self,
        folder: Path,
        harness: Harness,
        redis: Part,
        redis_port: int,
        *,
        dtype: str,
        engines: Engines,
    ) -> None:
        self.folder = folder
        self.fault_points = harness.fault_points
        self.redis = Member(redis, (), {})
        self.engines: list[Member] = []
        self.gateways: list[Member] = []
        self.redis_port = redis_port
        self.undisturbed: dict[str, Transcript] = {}
        self._fork_server = harness.fork_server
        self._dtype = dtype
        self._setup = SETUPS[engines]
        self.model = DEMO_MODEL
        """Folder of the model that all rows but those of a second one ask for."""
        self._has_texts = dtype == TEXTS_DTYPE and engines is Engines.PLAIN
        self._broker: Broker | None = None
        self._number = 0
        self._refused = 0
        self._counted: dict[str, tuple[int, int]] = {}

    @property
    def members(self) -> list[Member]:
        """All parts."""
        return [*self.gateways, *self.engines, self.redis]

    def member_of(self, pid: int) -> Member | None:
        """Return the part that a process is of; None where it has ended."""
        return next((each for each in self.members if pid in (each.pid, *descendants_of(each.pid))), None)

    async def add_engine(self, stack: AsyncExitStack) -> None:
        """Start one more engine behind its own proxy to Redis."""
        proxy = await stack.enter_async_context(Proxy(self.redis_port))
        name = f"engine-{len(self.engines)}"
        arguments = [str(self.model), "--redis", f"redis://127.0.0.1:{proxy.port}/0", "--served-model-name", MODEL]
        arguments += ["--engine-id", name, "--dtype", self._dtype]
        mode = self._setup.modes[len(self.engines) % len(self._setup.modes)]
        if self._setup.has_other_model:
            arguments += ["--models", f"{OTHER_MODEL}={self.folder / OTHER_MODEL}"]
        command = [MODULES[0], *arguments, *ENGINE_OPTIONS, *self._setup.options, *mode]
        part = ForkedPart(name, command, self.folder / f"{name}.log", server=self._fork_server)
        self.engines.append(Member(part, (proxy,), {}))
        part.start()

    async def add_gateway(self, stack: AsyncExitStack) -> None:
        """Start one more gateway behind its own proxy to Redis; its clients come through two more."""
        name = f"gateway-{len(self.gateways)}"
        http_port, grpc_port = free_port(), free_port()
        proxies = [await stack.enter_async_context(Proxy(port)) for port in (self.redis_port, http_port, grpc_port)]
        arguments = ["--redis", f"redis://127.0.0.1:{proxies[0].port}/0", "--gateway-id", name]
        ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
        part = ForkedPart(name, [MODULES[1], *arguments, *ports], self.folder / f"{name}.log", server=self._fork_server)
        addresses = {"sse": f"http://127.0.0.1:{proxies[1].port}", "grpc": f"127.0.0.1:{proxies[2].port}"}
        self.gateways.append(Member(part, proxies, addresses))
        part.start()

    def engines_with(self, options: Collection[str]) -> list[Member]:
        """Return the engines whose command has one of these options, or of their values."""
        return [engine for engine in self.engines if not set(options).isdisjoint(engine.part.command)]

    def model_of(self, row: FeatureRow) -> str:
        """Return the model that a row asks for."""
        if row.is_adapted:
            return ADAPTER
        place = [each.name for each in FEATURE_ROWS].index(row.name)
        return OTHER_MODEL if self._setup.has_other_model and place % 2 else MODEL

    async def load_adapter(self) -> None:
        """Let requests name the adapter that rows ask for."""
        folder = await asyncio.to_thread(write_adapter, self.folder / ADAPTER, self.model)
        adapter = Adapter(name=ADAPTER, model=MODEL, path=str(folder), revision=adapter_revision(folder))
        await (await self.broker()).adapters.publish(adapter)

    async def broker(self) -> Broker:
        """Return the harness' own connection to Redis."""
        if self._broker is None:
            self._broker = await Broker.connect(f"redis://127.0.0.1:{self.redis_port}/0")
        return self._broker

    async def close(self) -> None:
        """End every process."""
        if self._broker is not None:
            await self._broker.close()
        for member in self.members:
            member.part.stop()

    # -- faults --

    def inject(self, fault: Fault, victims: Collection[Member]) -> None:
        """Inject a fault into all victims now."""
        for victim in victims:
            if fault is Fault.KILL:
                victim.part.signal(signal.SIGKILL)
            elif fault is Fault.STOP:
                victim.part.signal(signal.SIGSTOP)
            elif fault is Fault.FILL:
                self._refused = self._num_refused()
                self._limit_memory(1)  # below what is used: nothing that needs memory gets in between
                for proxy in (proxy for gateway in self.gateways for proxy in gateway.proxies[1:]):
                    proxy.reset_clients()
            else:
                for proxy in self._proxies(victim):
                    proxy.cut()

    async def repair(self, fault: Fault, victims: Collection[Member], *, supervised: bool = False) -> None:
        """Restart killed parts at once; resume the others when every lease has lapsed, a full Redis when graces have.
        A rank that is stopped is killed by its group, which finds it at its next step: one that has nothing more to do
        finds nothing, and goes on when the rank does.

        `supervised` expires a killed engine's lease first, as `pagestream serve` does.
        """
        if fault is Fault.KILL or any(isinstance(victim.part, RankPart) for victim in victims):
            for victim in sorted(victims, key=lambda member: member is not self.redis):
                if fault is Fault.STOP and await self._is_idle(victim):
                    victim.part.signal(signal.SIGCONT)
                    continue
                # In a thread: a worker whose engine was killed ends by way of Redis, through a proxy of this loop.
                await asyncio.to_thread(victim.part.wait)
                if supervised and victim in self.engines:
                    await self.expire_engines([victim])
                victim.part.start()
            return
        if fault is Fault.FILL:
            await asyncio.sleep(PAST_GRACE_S)  # the length of the fault is what is tested
            refused = self._num_refused()
            self._limit_memory(0)
            if refused == self._refused:
                raise StackError("Redis was at its memory limit and refused nothing")
            return
        await asyncio.sleep(PAST_LEASE_S)  # the length of the outage is what is tested
        for victim in victims:
            if fault is Fault.STOP:
                victim.part.signal(signal.SIGCONT)
            else:
                for proxy in self._proxies(victim):
                    proxy.heal()

    async def _is_idle(self, victim: Member) -> bool:
        """Return whether the engine of a stopped rank has no request for longer than a busy one needs to find it."""
        idle_since = began = time.monotonic()
        while isinstance(victim.part, RankPart) and victim.part.is_worker_alive():
            if time.monotonic() - began > LIMIT_S:
                return False  # it hangs
            if self._num_owned(victim.part.worker_name):
                idle_since = time.monotonic()
            if time.monotonic() - idle_since > IDLE_S:
                return True
            await asyncio.sleep(POLL_S)
        return False

    def _num_owned(self, engine: str) -> int:
        """Return how many unfinished requests an engine owns in Redis."""
        with Redis(port=self.redis_port, decode_responses=True) as client:
            keys = list(client.scan_iter(f"ps:{{*}}:owned:{engine}:*", count=1000))
            return sum(client.scard(key) for key in keys)

    def _limit_memory(self, maxmemory: int) -> None:
        """Set the bytes that Redis may use; 0 for no limit."""
        with Redis(port=self.redis_port) as client:
            client.config_set("maxmemory", maxmemory)

    def _num_refused(self) -> int:
        """Return how many commands Redis has refused for want of memory since its start."""
        with Redis(port=self.redis_port) as client:
            return int(client.info("errorstats").get("errorstat_OOM", {"count": 0})["count"])

    def _proxies(self, victim: Member) -> list[Proxy]:
        """Return the proxies to cut: a part's own; for Redis, those of all other parts to it."""
        if victim is self.redis:
            return [member.proxies[0] for member in (*self.engines, *self.gateways)]
        return list(victim.proxies)

    async def expire_engines(self, engines: Collection[Member]) -> None:
        """Expire engines' leases, so that their requests are reclaimed at once."""
        broker = await self.broker()
        for engine in engines:
            try:
                await expire_engine(broker, engine.name)
            except StreamsError:
                return  # Redis can't be reached: the lease lapses later

    # -- readiness --

    async def wait_ready(self, *, engines: int | None = None) -> None:
        """Wait until every gateway and `engines` engines (None: all) serve.

        Raises:
            StackError: a gateway has ended, or READY_LIMIT_S is over.
        """
        end = time.monotonic() + READY_LIMIT_S
        enough = len(self.engines) if engines is None else engines
        async with httpx.AsyncClient(timeout=2.0, verify=False) as client:  # noqa: S501 - there is no TLS here
            while not await self._is_ready(client, enough):
                if time.monotonic() > end:
                    raise StackError(f"not everything served within {READY_LIMIT_S:.0f} s: {self._states()}")
                await asyncio.sleep(POLL_S)

    async def _is_ready(self, client: httpx.AsyncClient, engines: int) -> bool:
        if sum(member.part.has_said_ready() for member in self.engines) < engines:
            return False
        for gateway in self.gateways:
            if not gateway.part.is_alive():
                raise StackError(f"{gateway.name} has ended\n{gateway.part.log_tail()}")
            try:
                response = await client.get(f"{gateway.addresses['sse']}/readyz")
            except httpx.HTTPError:
                return False
            if response.status_code != httpx.codes.OK:
                return False
        return True

    def _states(self) -> str:
        return ", ".join(f"{member.name}: {'alive' if member.part.is_alive() else 'dead'}" for member in self.members)

    async def count_interrupted_and_swapped(self) -> tuple[int, int]:
        """Return how many groups the living engines have interrupted, and the bytes of blocks that came back from host
        memory, both since the last call. An engine's counts are a heartbeat old, and lost when it is killed.
        """
        connection = (await self.broker()).connection
        keyspace = connection.keyspace
        living = [each.decode() for each in await connection.execute("ZRANGE", keyspace.engines(MODEL), 0, -1)]
        fields = ("displaced", "loaded_bytes")
        found = await connection.pipeline([("HMGET", keyspace.engine(each), *fields) for each in living])
        interrupted = swapped_bytes = 0
        for each, counts in zip(living, found, strict=True):
            known, now = self._counted.get(each, (0, 0)), (int(counts[0] or 0), int(counts[1] or 0))
            interrupted, swapped_bytes = interrupted + now[0] - known[0], swapped_bytes + now[1] - known[1]
            self._counted[each] = now
        return interrupted, swapped_bytes

    async def num_quarantined(self) -> int:
        """Return the number of quarantined requests."""
        broker = await self.broker()
        models = (MODEL, OTHER_MODEL) if self._setup.has_other_model else (MODEL,)
        return sum([len(await broker.quarantined(model)) for model in models])

    # -- clients and references --

    def client(
        self,
        kind: type[FeatureClient],
        row: FeatureRow,
        *,
        first: int = 0,
        seed: int | None = None,
    ) -> FeatureClient:
        """Return a client of a row that starts at gateway `first`, with an idempotency key of its own."""
        self._number += 1
        addresses = [gateway.addresses[kind.api] for gateway in self.gateways]
        addresses = [*addresses[first:], *addresses[:first]]
        model = self.model_of(row)
        if not self._has_texts:
            row = replace(row, finish=None)
        return kind(row, addresses, model=model, key=f"{row.name} {self._number}", seed=seed)

    def clients(self, half: int | None = None) -> list[FeatureClient]:
        """Return a client of each row over each API, spread over the gateways.

        With `half`, each row is over one API: every second one over gRPC, the others if it is odd.
        """
        number = len(self.gateways)
        return [
            self.client(kind, row, first=(place + shift) % number)
            for place, row in enumerate(FEATURE_ROWS)
            for shift, kind in enumerate(clients_of(row))
            if half is None or len(clients_of(row)) == 1 or (place + shift + half) % 2 == 0
        ]

    async def reference(self, client: FeatureClient) -> Transcript:
        """Return the undisturbed run of a client's request. It may have to run first: disturb nothing meanwhile."""
        if not client.row.seed_is_chosen:
            if client.name not in self.undisturbed:
                self.undisturbed[client.name] = await self.client(type(client), client.row).run()
            return self.undisturbed[client.name]
        spec = await (await self.broker()).spec(client.request_id, TENANT)
        return await self.client(type(client), client.row, seed=spec.sampling.seed).run()

    async def record_references(self) -> None:
        """Run every row undisturbed, all at once: the engines' mode makes no row depend on others in its batch."""
        rows = [(kind, row) for row in FEATURE_ROWS if not row.seed_is_chosen for kind in clients_of(row)]
        await asyncio.gather(*(self.reference(self.client(kind, row)) for kind, row in rows))
        for row in FEATURE_ROWS:
            if not row.seed_is_chosen and not row.is_list:
                self._compare_apis(row)

    def _compare_apis(self, row: FeatureRow) -> None:
        over_grpc, over_http = (self.undisturbed[f"{row.name} ({kind.api})"] for kind in clients_of(row))
        if (over_grpc.digest, over_grpc.usage) != (over_http.digest, over_http.usage):
            raise StackError(f"{row.name}: the two APIs answered differently")


@dataclass(frozen=True)
class Harness:
    """What clusters that follow each other share: the imports of their processes, and the fault points."""

    fork_server: ForkServer
    fault_points: FaultPointController


@asynccontextmanager
async def running_harness(folder: Path) -> AsyncIterator[Harness]:
    """Yield the harness of clusters that run one after the other."""
    async with FaultPointController(folder / "faults") as controller:
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        fork_server = ForkServer(MODULES, {VARIABLE: str(controller.path), "OMP_NUM_THREADS": threads})
        try:
            yield Harness(fork_server, controller)
        finally:
            fork_server.close()


@asynccontextmanager
async def running_cluster(
    folder: Path,
    harness: Harness,
    *,
    dtype: str = TEXTS_DTYPE,
    engines: Engines = Engines.PLAIN,
) -> AsyncIterator[FaultCluster]:
    """Yield a ready cluster with recorded references; the tails of all logs are added to an exception as notes.

    The two engines compute in `dtype`, in deterministic mode, as their set-up says.
    """
    async with AsyncExitStack() as stack:
        redis_port, data = free_port(), folder / "redis"
        data.mkdir(parents=True)
        redis = Part("redis", server_command(find_server(), data, redis_port), folder / "redis.log")
        cluster = FaultCluster(folder, harness, redis, redis_port, dtype=dtype, engines=engines)
        redis.start()
        stack.push_async_callback(cluster.close)
        try:
            await cluster.broker()
            if (write := SETUPS[engines].write_model) is not None:
                cluster.model = await asyncio.to_thread(write, folder / "model")
            if SETUPS[engines].has_other_model:
                await asyncio.to_thread(write_other_model, folder / OTHER_MODEL)
            for _ in range(NUM_ENGINES):
                await cluster.add_engine(stack)
            for _ in range(NUM_GATEWAYS):
                await cluster.add_gateway(stack)
            await cluster.wait_ready()
            await cluster.load_adapter()
            await cluster.record_references()
            yield cluster
        except Exception as error:
            for member in cluster.members:
                error.add_note(f"--- {member.name}\n{member.part.log_tail()}")
            raise
