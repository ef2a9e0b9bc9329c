"""How durable a write has to be before it counts: on the server's disk, on a number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import exceptions

from pagestream_streams.errors import Unavailable
from pagestream_streams.protocol.records import Argument
from pagestream_streams.settings import StreamsSettings

_TOUCH = "redis.call('PERSIST', KEYS[1]) return redis.call('SET', KEYS[1], '1', 'PX', 60000)"
"""A write that always reaches the replicas and the append-only file, and expires.

Redis refuses no write of a script once it has written: PERSIST needs no memory, so SET is let through when it is full.
"""


@dataclass(frozen=True)
class Durability:
    """What each write waits for; nothing where neither disk nor replicas are asked for."""

    replicas: int
    on_disk: bool
    timeout_ms: int

    @classmethod
    def of(cls, settings: StreamsSettings) -> Durability:
        """Take wait_replicas, wait_fsync and wait_timeout_ms."""
        return cls(settings.wait_replicas, settings.wait_fsync, settings.wait_timeout_ms)

    @property
    def is_required(self) -> bool:
        """Whether writes wait at all."""
        return self.replicas > 0 or self.on_disk

    def commands(self, prefix: str) -> Sequence[Sequence[Argument]]:
        """Return a write and the waits for it, to be sent after a command on the command's connection.

        WAIT counts the writes of its own connection, and a repeated append or a read has none: hence the write.
        Replicas and the append-only file keep the order: once they have it, they have all that the command saw.
        """
        commands: list[Sequence[Argument]] = [("EVAL", _TOUCH, 1, f"{prefix}waited")]
        if self.replicas:
            commands.append(("WAIT", self.replicas, self.timeout_ms))
        if self.on_disk:
            # After WAIT, since it asks the replicas at once what their disks have. A replica is asked when it has
            # received the write and has not synced it, and then says more only once a second.
            commands.append(("WAITAOF", 1, self.replicas, self.timeout_ms))
        return commands

    def check(self, replies: Sequence[Any]) -> None:
        """Raise Unavailable where the replies to `commands` show less than was asked for."""
        touched, *_, reached = replies
        if isinstance(touched, Exception):
            raise touched
        if isinstance(reached, exceptions.ResponseError) and "unknown command" in str(reached):
            raise Unavailable("wait_fsync needs WAITAOF, which Redis and Valkey have from 7.2 on; unset it, or update")
        if isinstance(reached, exceptions.ResponseError):
            raise Unavailable(f"Redis can't wait for what wait_fsync and wait_replicas ask: {reached}")
        if isinstance(reached, Exception):
            raise reached
        disks, replicas = reached if self.on_disk else (1, reached)
        if disks < 1 or replicas < self.replicas:
            wanted = [*(["its own disk"] if self.on_disk else []), f"{self.replicas} replicas"]
            raise Unavailable(
                f"a write did not reach {' and '.join(wanted)} within {self.timeout_ms} ms "
                f"(wait_fsync, wait_replicas, wait_timeout_ms); it reached {replicas} replicas"
            )
