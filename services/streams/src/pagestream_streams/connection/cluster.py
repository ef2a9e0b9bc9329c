"""A Redis Cluster: send commands to the node that has their key, and follow slots that move."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from redis import exceptions
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.connection import Connection as Socket

from pagestream_streams.connection.base import Command, close_idle
from pagestream_streams.protocol.records import Argument
from pagestream_streams.tasks import cancel

_MOST_REDIRECTIONS = 5
_REFRESH_PAUSE_S = 0.2
# Index of a command's key where it isn't 1.
_KEY_AT = {"EVAL": 3, "EVALSHA": 3, "MEMORY": 2, "XGROUP": 2}
_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)


class ClusterTopology:
    """A cluster. Each script's keys share a hash tag, so one node has them all.

    redis-py keeps the nodes, their slots and connections; commands are sent here. redis-py's own sending closes every
    node's connections under the commands that wait on them, sends ASKING on another connection than its command, sleeps
    before it reports an error, and fails a whole pipeline for one node's error.
    """

    is_cluster = True

    def __init__(self, cluster: RedisCluster, connections: WeakSet[AbstractConnection], max_commands: int) -> None:
        """`connections`: all that the cluster's nodes make, those too that have left it.

        More commands or pipelines at once than `max_commands` wait. A node has a connection for each.
        """
        self.cluster = cluster
        self._connections = connections
        self._turns = asyncio.Semaphore(max_commands)
        self._refreshed_at = float("-inf")
        self._refreshing: asyncio.Task[None] | None = None
        self._is_closed = False

    async def execute(self, *command: Argument) -> Any:
        """Run one command; see Topology."""
        [reply] = await self.pipeline([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def execute_on_each(self, *command: Argument) -> list[Any]:
        """Run a command without a key on each master; see Topology."""
        async with self._turns:
            await self.cluster.initialize()
            batches = (self._batch(node, [command]) for node in self.cluster.get_primaries())
            return [reply for replies in await asyncio.gather(*batches) for reply in replies]

    async def pipeline(self, commands: Sequence[Command], limit_s: float | None = None) -> list[Any]:
        """Run commands in one round trip to each node; see Topology.

        A lost connection is the reply of its commands, too. A node that is silent for longer than the limit is left.
        """
        until = None if limit_s is None else asyncio.get_running_loop().time() + limit_s
        try:
            async with asyncio.timeout_at(until):
                await self._turns.acquire()
        except TimeoutError as error:
            return [error] * len(commands)
        try:
            await self.cluster.initialize()
            replies: list[Any] = [None] * len(commands)
            places: defaultdict[ClusterNode, list[int]] = defaultdict(list)
            for place, command in enumerate(commands):
                try:
                    places[self.node(_key(command))].append(place)
                except exceptions.RedisClusterException as error:
                    replies[place] = error
            batches = (self._batch(node, [commands[place] for place in mine], limit_s) for node, mine in places.items())
            for mine, found in zip(places.values(), await asyncio.gather(*batches), strict=True):
                for place, reply in zip(mine, found, strict=True):
                    replies[place] = await self._redirected(commands[place], reply, until)
            await self._learn(replies)
            return replies
        finally:
            self._turns.release()

    async def pipeline_to(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """Run commands on one connection to the node that has `key`; see Topology."""
        async with self._turns:
            await self.cluster.initialize()
            replies = await self._batch(self.node(key), commands)
            await self._learn(replies)
            return replies

    def pubsub(self) -> PubSub:
        """Return a subscriber on a connection of its own."""
        pubsub: PubSub = self.cluster.pubsub()
        return pubsub

    async def drop_idle(self) -> None:
        """Close the connections on which no command waits; the next command opens them again."""
        await asyncio.gather(*(close_idle(node._free) for node in self.cluster.get_nodes()))

    async def close(self) -> None:
        """Close every connection.

        redis-py leaves those that were opened since it last called the cluster closed, and some of nodes that have
        left it.
        """
        self._is_closed = True
        if self._refreshing is not None:
            await cancel(self._refreshing)
        try:
            await self.cluster.aclose()
        finally:
            left = [each.disconnect(nowait=True) for each in list(self._connections) if each.is_connected]
            await asyncio.gather(*left, return_exceptions=True)

    def node(self, key: Argument) -> ClusterNode:
        """Return the node that has a key. redis-py's SlotNotCoveredError where no node has its slot."""
        node = self.cluster.get_node_from_key(str(key))
        if node is None:
            raise exceptions.SlotNotCoveredError(f"no node has the slot of {key!r}")
        return node

    async def _batch(self, node: ClusterNode, commands: Sequence[Command], limit_s: float | None = None) -> list[Any]:
        """Return each command's reply or error; all have one where the connection is lost."""
        try:
            async with asyncio.timeout(limit_s):
                socket = node.acquire_connection()
                try:
                    return await _replies(node, socket, commands)
                finally:
                    if self.cluster.get_node(node_name=node.name) is not node:
                        await socket.disconnect(nowait=True)  # the node has left meanwhile, and nobody closes it again
                    node.release(socket)
        except _LOST as error:
            return [error] * len(commands)

    async def _redirected(self, command: Command, reply: Any, until: float | None) -> Any:
        """Follow MOVED and ASK, and return the reply at their end. `until`: no longer than to this time of the loop."""
        for _ in range(_MOST_REDIRECTIONS):
            left_s = None if until is None else until - asyncio.get_running_loop().time()
            if left_s is not None and left_s <= 0:
                break  # it has run nowhere; sent now, it would run and its reply be lost
            if isinstance(reply, exceptions.MovedError):
                await self.cluster.nodes_manager.move_slot(reply)
                [reply] = await self._batch(self.node(_key(command)), [command], left_s)
            elif isinstance(reply, exceptions.AskError):
                node = self.cluster.get_node(host=reply.host, port=reply.port)
                if node is None:
                    return reply
                _, reply = await self._batch(node, [("ASKING",), command], left_s)
            else:
                break
        return reply

    async def _learn(self, replies: Sequence[Any]) -> None:
        """Update the slot table from MOVED replies; read it anew where a node was lost or a slot has no owner."""
        for reply in replies:
            if isinstance(reply, exceptions.MovedError):
                await self.cluster.nodes_manager.move_slot(reply)
            elif isinstance(reply, (exceptions.ClusterDownError, exceptions.SlotNotCoveredError, *_LOST)):
                self._refresh_soon()
                return

    def _refresh_soon(self) -> None:
        """Read the slot table in the background, at most every _REFRESH_PAUSE_S seconds: nodes need time to agree.

        In the background because the first node that is asked may hang.
        """
        now = asyncio.get_running_loop().time()
        is_refreshing = self._refreshing is not None and not self._refreshing.done()
        if not self._is_closed and not is_refreshing and now - self._refreshed_at >= _REFRESH_PAUSE_S:
            self._refreshed_at = now
            self._refreshing = asyncio.create_task(self._refresh(), name="refresh slots")

    async def _refresh(self) -> None:
        """Read the slot table, without closing connections on which commands wait."""
        with suppress(exceptions.RedisError, exceptions.RedisClusterException, OSError):
            await self.cluster.nodes_manager.initialize()


def _key(command: Command) -> Argument:
    """Return the command's key; "" for one without."""
    if command[0] == "XREADGROUP":
        return command[command.index("STREAMS") + 1]
    place = _KEY_AT.get(str(command[0]), 1)
    return command[place] if len(command) > place else ""


async def _replies(node: ClusterNode, socket: Socket, commands: Sequence[Command]) -> list[Any]:
    try:
        await socket.send_packed_command(socket.pack_commands(commands))
        replies: list[Any] = []
        for command in commands:
            try:
                replies.append(await node.parse_response(socket, str(command[0])))
            except exceptions.ResponseError as error:
                replies.append(error)
        return replies
    except AttributeError as error:
        # A node that has left the cluster is closed, perhaps while a command opens its connection.
        await socket.disconnect(nowait=True)
        raise exceptions.ConnectionError("the connection was closed while it was being opened") from error
    except BaseException:
        # Replies that are still to come must not answer the next command.
        await socket.disconnect(nowait=True)
        raise
