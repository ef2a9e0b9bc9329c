"""The Python client under load while its gateways are killed and its network is cut: its streams continue unchanged.

The tests neither reconnect nor retry: each stream is one loop over `AsyncClient.generate`.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from pagestream_client import AsyncClient, AsyncStream, Chunk, Client, FinishReason, Generation, Transport, put_together
from support.engines.synthetic_engine import MODEL, running_engine
from support.faults.served import Served, running_serve
from support.faults.workloads import QUESTIONS
from support.network.flaky_network import FlakyNetwork
from support.processes.stack import DEMO_MODEL, START_LIMIT_S, Stack, StackError, running_stack
from support.processes.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

NUM_STREAMS = 24
NUM_TOKENS = 240
LONG = 480  # long enough for a gateway's restart
LIMIT_S = 120.0


@dataclass
class Reader:
    """One user's loop."""

    number: int
    max_tokens: int
    chunks: list[Chunk] = field(default_factory=list)

    async def read(self, client: AsyncClient) -> None:
        """Call generate once and read to the end."""
        question = QUESTIONS[self.number % len(QUESTIONS)] + " " * (self.number // 4)
        async for chunk in client.generate(
            "demo",
            messages=[{"role": "user", "content": question}],
            max_tokens=self.max_tokens,
            ignore_eos=True,
            temperature=0.8 if self.number % 2 else 0.0,
            seed=self.number,
            logprobs=1 if self.number % 3 == 0 else None,
            n=2 if self.number % 8 == 5 else 1,
        ):
            self.chunks.append(chunk)

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def content(self) -> tuple[object, ...]:
        """Return what is equal in two runs: all but the request's id and the borders of chunks."""
        answer: Generation = put_together(self.chunks)
        # Cached tokens depend on earlier runs.
        usage = answer.usage and (
            answer.usage.prompt_tokens,
            answer.usage.completion_tokens,
        )
        return answer.choices, usage, self.chunks[-1].next_index, self.chunks[-1].digest


Disturbance = Callable[[Sequence[Reader]], Awaitable[object]]


async def run_all(
    targets: Sequence[str], disturb: Disturbance | None = None, *, max_tokens: int = NUM_TOKENS
) -> list[Reader]:
    """Run all users at once, and `disturb` concurrently."""
    readers = [Reader(number, max_tokens) for number in range(NUM_STREAMS)]
    async with (
        asyncio.timeout(LIMIT_S),
        AsyncClient(targets) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for reader in readers:
            tasks.create_task(reader.read(client))
        if disturb is not None:
            await disturb(readers)
    return readers


async def until_tokens(readers: Sequence[Reader], count: int) -> None:
    """Wait until every stream has `count` tokens; `run_all` bounds the time."""
    while min(reader.num_tokens for reader in readers) < count:  # noqa: ASYNC110  readers set no event
        await asyncio.sleep(0.02)


def check(undisturbed: Sequence[Reader], disturbed: Sequence[Reader]) -> None:
    """Assert that every stream is complete, in order, without repetition, and equal to the undisturbed one."""
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after.content() == before.content()
        indices = [chunk.next_index for chunk in after.chunks]
        assert indices == sorted(set(indices))
        assert len({chunk.request_id for chunk in after.chunks}) == 1
        assert all(len(choice.token_ids) == after.max_tokens for choice in put_together(after.chunks).choices)


def kill_gateway(served: Served, name: str) -> None:
    """Kill a gateway with SIGKILL; return when another process serves in its place."""
    before = served.process(name)
    if before.pid is None:
        raise StackError(f"{name} does not run")
    os.kill(before.pid, signal.SIGKILL)

    def is_back() -> bool:
        now = served.process(name)
        try:
            answer = httpx.get(f"http://127.0.0.1:{now.ports['http']}/readyz", timeout=2.0)
        except httpx.HTTPError:
            return False
        return now.pid not in (before.pid, None) and answer.status_code == httpx.codes.OK

    wait_until(is_back, limit_s=START_LIMIT_S, what=f"{name} to be started again")


def test_gateways_that_are_killed_one_after_the_other(tmp_path: Path) -> None:
    unfinished: list[int] = []

    async def scenario(served: Served) -> tuple[list[Reader], list[Reader]]:
        targets = served.record.grpc_targets()
        assert len(targets) == 2

        async def kill_both(readers: Sequence[Reader]) -> None:
            await until_tokens(readers, LONG // 8)
            for number in range(2):
                unfinished.append(sum(reader.chunks[-1].usage is None for reader in readers))
                await asyncio.to_thread(kill_gateway, served, f"gateway-{number}")

        return await run_all(targets, max_tokens=LONG), await run_all(targets, kill_both, max_tokens=LONG)

    with running_serve(tmp_path, "--gateways", "2") as served:
        undisturbed, disturbed = asyncio.run(scenario(served))
    assert len(unfinished) == 2
    assert all(unfinished), "a gateway was killed after the streams had ended"
    check(undisturbed, disturbed)


def num_connections(networks: Sequence[FlakyNetwork]) -> int:
    return sum(network.num_connections for network in networks)


def test_a_network_that_is_cut_again_and_again(tmp_path: Path) -> None:
    @asynccontextmanager
    async def networks_of(stack: Stack) -> AsyncIterator[list[FlakyNetwork]]:
        async with AsyncExitStack() as opened:
            yield [await opened.enter_async_context(FlakyNetwork(gateway.grpc_port)) for gateway in stack.gateways]

    async def scenario(stack: Stack) -> tuple[list[Reader], list[Reader], int]:
        async with networks_of(stack) as networks:
            targets = [network.target for network in networks]

            async def cut(readers: Sequence[Reader]) -> None:
                for part in range(1, 6):
                    await until_tokens(readers, NUM_TOKENS * part // 8)
                    attempts = num_connections(networks)
                    for network in networks:
                        network.reset()
                    while num_connections(networks) == attempts:  # noqa: ASYNC110  until a client met the cut
                        await asyncio.sleep(0.02)
                    for network in networks:
                        network.repair()

            undisturbed = await run_all(targets)
            before = num_connections(networks)
            disturbed = await run_all(targets, cut)
            return undisturbed, disturbed, num_connections(networks) - before

    with running_stack(tmp_path, gateways=2) as stack:
        undisturbed, disturbed, connections = asyncio.run(scenario(stack))
    assert connections >= 5, "the connections outlived the cuts"
    check(undisturbed, disturbed)


def test_gateways_that_are_stopped_and_go_on(tmp_path: Path) -> None:
    """They neither reset connections nor answer; a client can only notice their silence."""
    unfinished: list[int] = []

    async def scenario(stack: Stack) -> tuple[list[Reader], list[Reader]]:
        targets = [gateway.grpc_target for gateway in stack.gateways]

        async def stop_both(readers: Sequence[Reader]) -> None:
            await until_tokens(readers, LONG // 8)
            for gateway, share in zip(stack.gateways, (2, 1), strict=True):
                unfinished.append(sum(reader.chunks[-1].usage is None for reader in readers))
                gateway.signal(signal.SIGSTOP)
                await until_tokens(readers, LONG // share)
                gateway.signal(signal.SIGCONT)
                await asyncio.to_thread(wait_until, gateway.is_ready, limit_s=START_LIMIT_S, what=gateway.name)

        return await run_all(targets, max_tokens=LONG), await run_all(targets, stop_both, max_tokens=LONG)

    with running_stack(tmp_path, gateways=2) as stack:
        undisturbed, disturbed = asyncio.run(scenario(stack))
    # All streams are on one gateway: where that is the second one stopped, they have half of their tokens by then.
    assert len(unfinished) == 2
    assert all(unfinished), "a gateway was stopped after the streams had ended"
    check(undisturbed, disturbed)


class ProbesAlone(Transport):
    """The default transport without gRPC's flow control pings after data, which may notice a silence sooner."""

    def options(self) -> list[tuple[str, int]]:
        return [*super().options(), ("grpc.http2.bdp_probe", 0)]


@pytest.mark.parametrize("kind", [AsyncClient, pytest.param(Client, marks=pytest.mark.slow)])
def test_a_quiet_stream_of_a_gateway_that_is_stopped(tmp_path: Path, kind: type[AsyncClient] | type[Client]) -> None:
    """It resumes before the request counts as unread, although no token is due that would reveal the silence."""

    async def scenario(stack: Stack) -> Generation:
        async with asyncio.timeout(LIMIT_S), running_engine(stack.redis_url) as engine:
            engine.hold_at = 2
            gateways = {gateway.grpc_target: gateway for gateway in (stack.add_gateway(), stack.add_gateway())}
            await asyncio.to_thread(stack.wait_ready)
            client = kind(list(gateways), transport=ProbesAlone())
            stream = client.generate(MODEL, "hello", max_tokens=6, seed=0)

            async def stop_gateway() -> None:
                first = client._configuration.endpoints.current
                gateways[first].signal(signal.SIGSTOP)
                while client._configuration.endpoints.current == first:  # noqa: ASYNC110  it sets no event
                    await asyncio.sleep(0.02)
                engine.go_on()

            async with asyncio.TaskGroup() as tasks:
                if isinstance(stream, AsyncStream):
                    await stream.accepted()
                    tasks.create_task(stop_gateway())
                    answer = await stream.collect()
                else:
                    await asyncio.to_thread(stream.accepted)
                    tasks.create_task(stop_gateway())
                    answer = await asyncio.to_thread(stream.collect)
            closing = client.close()
            if closing is not None:
                await closing
            return answer

    stack = Stack(tmp_path, model=DEMO_MODEL, engine_options=())
    try:
        stack.redis.start()
        answer = asyncio.run(scenario(stack))
    finally:
        stack.stop()
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("abcdef", FinishReason.LENGTH)
