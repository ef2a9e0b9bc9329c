"""The Python client under load while its gateways are killed and its network is cut: its streams continue unchanged.

The tests neither reconnect nor retry: each stream is one loop over `AsyncClient.generate`.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from pagestream_client import AsyncClient, AsyncStream, Client, FinishReason, Generation, Transport, put_together
from support.clients.readers import Reader
from support.engines.paced_worker import PACE, token_at
from support.engines.synthetic_engine import MODEL, running_engine
from support.network.proxy import Proxy
from support.processes.stack import DEMO_MODEL, Stack, running_stack
from support.processes.waiting import wait_until

pytestmark = pytest.mark.served

NUM_STREAMS = 12
NUM_TOKENS = 400  # of 30 ms each: long enough for a restart of two gateways
LIMIT_S = 200.0


@dataclass
class User(Reader):
    """One user, with a prompt of its own."""

    number: int = 0

    @property
    def prompt(self) -> list[int]:
        return [20 + self.number, 5, 6]

    async def ask(self, client: AsyncClient) -> None:
        """Call generate once and read to the end."""
        request = {"prompt_token_ids": self.prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": self.number}
        await self.read(client, "demo", n=2 if self.number % 8 == 5 else 1, **request)

    def check(self) -> None:
        """Assert that the stream is complete, in order, without repetition."""
        self.content()
        start = self.prompt[0] + len(self.prompt)
        for choice in put_together(self.chunks).choices:
            assert list(choice.token_ids) == [token_at(start + place) for place in range(NUM_TOKENS)]


Disturbance = Callable[[Sequence[User]], Awaitable[object]]


async def run_all(targets: Sequence[str], disturb: Disturbance | None = None) -> list[User]:
    """Run all users at once, and `disturb` concurrently."""
    readers = [User(number=number) for number in range(NUM_STREAMS)]
    async with (
        asyncio.timeout(LIMIT_S),
        AsyncClient(targets) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for reader in readers:
            tasks.create_task(reader.ask(client))
        if disturb is not None:
            await disturb(readers)
    return readers


async def until_tokens(readers: Sequence[User], count: int) -> None:
    """Wait until every stream has `count` tokens; `run_all` bounds the time."""
    while min(reader.num_tokens for reader in readers) < count:  # noqa: ASYNC110  readers set no event
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    paced = "support.engines.paced_worker"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PACE, "0.03")
        folder = tmp_path_factory.mktemp("stack")
        with running_stack(folder, gateways=2, engine_module=paced, is_forked=True) as stack:
            yield stack


def test_gateways_that_are_killed_one_after_the_other(stack: Stack) -> None:
    unfinished: list[int] = []

    async def kill_both(readers: Sequence[User]) -> None:
        await until_tokens(readers, NUM_TOKENS // 8)
        for gateway in stack.gateways:
            unfinished.append(sum(not reader.has_ended for reader in readers))
            await asyncio.to_thread(gateway.kill)
            gateway.start()
            await asyncio.to_thread(wait_until, gateway.is_ready, limit_s=LIMIT_S, what=gateway.name)

    disturbed = asyncio.run(run_all([gateway.grpc_target for gateway in stack.gateways], kill_both))
    assert len(unfinished) == 2
    assert all(unfinished), "a gateway was killed after the streams had ended"
    for reader in disturbed:
        reader.check()


def num_connections(networks: Sequence[Proxy]) -> int:
    return sum(network.num_connections for network in networks)


def test_a_network_that_is_cut_again_and_again(stack: Stack) -> None:
    async def scenario() -> tuple[list[User], int]:
        async with AsyncExitStack() as opened:
            networks = [await opened.enter_async_context(Proxy(gateway.grpc_port)) for gateway in stack.gateways]

            async def cut(readers: Sequence[User]) -> None:
                for part in range(1, 5):
                    await until_tokens(readers, NUM_TOKENS * part // 8)
                    attempts = num_connections(networks)
                    for network in networks:
                        network.reset()
                    while num_connections(networks) == attempts:  # noqa: ASYNC110  until a client met the cut
                        await asyncio.sleep(0.02)
                    for network in networks:
                        network.repair()

            disturbed = await run_all([network.target for network in networks], cut)
            return disturbed, num_connections(networks)

    disturbed, connections = asyncio.run(scenario())
    assert connections > 4, "the connections outlived the cuts"
    for reader in disturbed:
        reader.check()


@pytest.mark.slow
def test_gateways_that_are_stopped_and_go_on(stack: Stack) -> None:
    """They neither reset connections nor answer; a client can only notice their silence."""
    unfinished: list[int] = []

    async def stop_both(readers: Sequence[User]) -> None:
        await until_tokens(readers, NUM_TOKENS // 8)
        for gateway, share in zip(stack.gateways, (2, 1), strict=True):
            unfinished.append(sum(not reader.has_ended for reader in readers))
            gateway.signal(signal.SIGSTOP)
            await until_tokens(readers, NUM_TOKENS // share)
            gateway.signal(signal.SIGCONT)
            await asyncio.to_thread(wait_until, gateway.is_ready, limit_s=LIMIT_S, what=gateway.name)

    disturbed = asyncio.run(run_all([gateway.grpc_target for gateway in stack.gateways], stop_both))
    # All streams are on one gateway: where that is the second one stopped, they have half of their tokens by then.
    assert len(unfinished) == 2
    assert all(unfinished), "a gateway was stopped after the streams had ended"
    for reader in disturbed:
        reader.check()


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

    stack = Stack(tmp_path, model=DEMO_MODEL, engine_options=(), is_forked=True)
    try:
        stack.redis.start()
        answer = asyncio.run(scenario(stack))
    finally:
        stack.stop()
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("abcdef", FinishReason.LENGTH)
