"""All classes of inputs, each derived from a seed and a number."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from campaigns.malformed_inputs import http_bytes
from campaigns.malformed_inputs.batches import Batch, Outcome, Tally
from campaigns.malformed_inputs.grpc_inputs import GrpcInputs
from campaigns.malformed_inputs.http_calls import CallInputs
from campaigns.malformed_inputs.websocket_bytes import SocketInputs

CONNECT_LIMIT_S = 20.0
_READ_BYTES = 65536
_LEAVING = 0.08  # share of connections whose client does not wait for its answers


class Inputs:
    """Makes batches: number N of a seed is always the same.

    Args:
        document: the OpenAPI document, which names routes and fields.
        model: a model that answers at once.
        admin_key: opens administrators' routes, where the document has any.
    """

    def __init__(self, document: Mapping[str, Any], model: str, seed: int, admin_key: str = "") -> None:
        calls, sockets, grpc = CallInputs(document, model, admin_key), SocketInputs(model), GrpcInputs(model)
        self._seed = seed
        self._makers: tuple[tuple[float, Callable[[Random], Batch]], ...] = (
            (0.27, calls.bodies),  # shares of connections, of which these two and gRPC's messages have many inputs
            (0.15, calls.others),
            (0.03, calls.uploads),
            (0.20, http_bytes.batch),
            (0.15, sockets.batch),
            (0.06, grpc.messages),
            (0.07, grpc.calls),
            (0.07, grpc.frames),
        )

    def batch(self, number: int) -> Batch:
        """Return a batch."""
        chance = Random(f"{self._seed}/{number}")
        weights, makers = zip(*self._makers, strict=True)
        batch = chance.choices(makers, weights)[0](chance)
        if chance.random() < _LEAVING:
            batch.kind = f"{batch.kind.partition(':')[0]}: clients that leave"
            batch.leaves_after_s = chance.choice((0.0, 0.001, 0.003, 0.01, 0.03, 0.1))
        return batch


class Sender:
    """Sends batches over a number of connections, and counts their outcomes."""

    def __init__(self, inputs: Inputs, http_port: int, grpc_port: int, *, connections: int) -> None:
        self._inputs = inputs
        self._ports = (http_port, grpc_port)
        self._connections = connections
        self._next = 0
        self._is_stopped = False
        self.tally = Tally()
        self.failures: list[str] = []
        """The first failed batches: number, class, and what was sent."""

    def stop(self) -> None:
        """Begin no further batch."""
        self._is_stopped = True

    async def send(self, count: int) -> None:
        """Send batches until there were `count` inputs. OSError where the server takes no connections."""

        async def worker() -> None:
            while self.tally.num_inputs < count and not self._is_stopped:
                number, self._next = self._next, self._next + 1
                await self._send_one(number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._connections):
                tasks.create_task(worker())

    async def _send_one(self, number: int) -> None:
        batch = self._inputs.batch(number)
        await exchange(batch, self._ports[batch.is_grpc])
        outcomes = batch.reader.outcomes()
        if batch.leaves_after_s is not None:
            outcomes = Counter({Outcome.UNANSWERED: batch.num_inputs})
        self.tally.add(batch.kind, outcomes)
        if outcomes[Outcome.FAILED] and len(self.failures) < 20:
            self.failures.append(f"batch {number}, {batch.kind}: {batch.data[:1500]!r}")
            print(f"batch {number}, {batch.kind}: {outcomes}", flush=True)


async def exchange(batch: Batch, port: int) -> None:
    """Send a batch over a connection of its own, and read until its reader has enough, or patience ends."""
    async with asyncio.timeout(CONNECT_LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(batch.data)
        patience_s = batch.reader.patience_s if batch.leaves_after_s is None else batch.leaves_after_s
        async with asyncio.timeout(patience_s) as patience:
            loop = asyncio.get_running_loop()
            while True:
                data = await reader.read(_READ_BYTES)
                if batch.reader.feed(data):
                    return
                if batch.leaves_after_s is None:
                    patience.reschedule(loop.time() + patience_s)
    except TimeoutError:
        return
    except ConnectionError:  # a reset, after which nothing comes
        batch.reader.feed(b"")
    finally:
        writer.transport.abort()
