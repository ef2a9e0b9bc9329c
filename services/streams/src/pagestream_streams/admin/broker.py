"""One process' door to Redis: its connections, the models, and what can be done to a request from outside."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from pagestream.v1.inference_pb2 import (
    REQUEST_STATE_FINISHED,
    REQUEST_STATE_QUEUED,
    REQUEST_STATE_RUNNING,
    FinishReason,
    RequestState,
    Usage,
)
from pagestream.v1.records_pb2 import LogSlice, ModelCard, RequestSpec

from pagestream_streams.admin import quarantine as dead
from pagestream_streams.admin.model_directory import Directory
from pagestream_streams.connection import wakeups
from pagestream_streams.connection.connection import Call, Connection
from pagestream_streams.connection.scripts import END, EXPIRE, VIEW
from pagestream_streams.errors import RequestNotFound
from pagestream_streams.protocol import keys
from pagestream_streams.protocol.finish_reasons import parse_finish_reason
from pagestream_streams.protocol.keys import Partition
from pagestream_streams.protocol.records import DeadRequest, ModelInfo, RequestView
from pagestream_streams.settings import StreamsSettings

_STATES: dict[bytes, RequestState] = {
    b"queued": REQUEST_STATE_QUEUED,
    b"running": REQUEST_STATE_RUNNING,
    b"finished": REQUEST_STATE_FINISHED,
}


class Broker:
    """Made by `Broker.connect`; closed by `close` or `async with`. Sessions are made over it and closed before it."""

    def __init__(self, connection: Connection, settings: StreamsSettings) -> None:
        """For `connect`."""
        self.connection = connection
        self.settings = settings
        self.directory = Directory(connection, settings)

    @classmethod
    async def connect(cls, url: str, settings: StreamsSettings | None = None) -> Broker:
        """Waits for a server that answers, at most settings.connect_timeout_s. Unavailable after that; ValueError for
        a malformed URL.
        """
        settings = settings or StreamsSettings()
        connection = Connection(url, settings)
        try:
            await connection.open()
        except BaseException:
            await connection.close()
            raise
        return cls(connection, settings)

    async def close(self) -> None:
        """Closes all connections."""
        await self.connection.close()

    async def __aenter__(self) -> Self:
        """The broker is open already."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it."""
        await self.close()

    async def ping(self) -> None:
        """Unavailable if Redis doesn't answer."""
        await self.connection.execute("PING")

    async def publish_model(self, card: ModelCard, *, partitions: int = 4) -> None:
        """Stores a model's card, so that gateways know the model even when no engine runs. An existing number of
        partitions is kept.

        Raises Unavailable, and ModelNameRefused for a name that can't be part of a key.
        """
        await self.directory.publish(card, partitions)

    async def model_card(self, name: str) -> ModelCard:
        """A model's card, cached by its digest. ModelNotFound. The caller must not change it."""
        return await self.directory.card(name)

    async def models(self) -> list[ModelInfo]:
        """All models by name. Unavailable."""
        return await self.directory.infos()

    async def partitions(self, model: str) -> int:
        """A model's number of partitions. ModelNotFound."""
        return await self.directory.partitions(model)

    async def view(self, request_id: str, tenant: str) -> RequestView:
        """Where a request stands. RequestNotFound also for other tenants' and malformed ids; Unavailable."""
        where = await self.directory.locate(request_id)
        found = await self.connection.run(VIEW, where.prefix, request_id, tenant)
        if found is None:
            raise RequestNotFound(request_id)
        spec, state, reason, next_index, digest, prompt, completion, cached, attempts, place, print_ = found
        return RequestView(
            request_id=request_id,
            model=where.model,
            tenant=tenant,
            state=_STATES[state],
            queue_position=None if place < 0 else place,
            finish_reason=parse_finish_reason(reason.decode()),
            next_index=int(next_index),
            digest=digest.decode(),
            usage=Usage(prompt_tokens=int(prompt), completion_tokens=int(completion), cached_tokens=int(cached)),
            attempts=int(attempts),
            spec=RequestSpec.FromString(spec),
            fingerprint=print_.decode(),
        )

    async def spec(self, request_id: str, tenant: str) -> RequestSpec:
        """A request as it was accepted. RequestNotFound, Unavailable."""
        return (await self.view(request_id, tenant)).spec

    async def cancel(self, request_id: str, tenant: str) -> FinishReason:
        """Ends a request in whatever state it is, also without any engine; returns how it ended, now or before.

        RequestNotFound, Unavailable.
        """
        where = await self.directory.locate(request_id)
        reason = await self.end(where, request_id, "cancelled", tenant=tenant)
        if reason is None:
            raise RequestNotFound(request_id)
        return reason

    async def dead(self, model: str) -> list[DeadRequest]:
        """A model's quarantined requests, the oldest first. ModelNotFound, Unavailable."""
        return await dead.listed(self.connection, await self.directory.all_partitions(model))

    async def dead_request(self, request_id: str) -> DeadRequest:
        """A quarantined request, whoever's it is. RequestNotFound also where it isn't quarantined; Unavailable."""
        return await dead.one(self.connection, await self.directory.locate(request_id), request_id)

    async def requeue_dead(self, request_id: str) -> str:
        """Lets a quarantined request go on from where it stood; returns the new id under which it does.

        Its old log has had its end and stays as it is. Requeueing again returns the same new id. It runs whether or
        not somebody reads, for the same tenant, and its deadline starts anew. RequestNotFound, Unavailable.
        """
        return await dead.revived(self.connection, await self.directory.locate(request_id), request_id)

    async def end(
        self, where: Partition, request_id: str, reason: str, *, tenant: str = "", condition: str = "", error: str = ""
    ) -> FinishReason | None:
        """Ends a request from outside and tells its readers; None where there is none, or where the condition doesn't
        hold.

        `condition` "deadlines", "graces" or "verdicts" ends it only if it is due there by Redis' clock at this moment;
        what ends by its verdict is listed as dead. `error` is "<code>\\0<message>".
        """
        settings = self.settings
        retention_s = settings.dead_retention_s if condition == "verdicts" else settings.retention_s
        arguments = request_id, tenant, reason, retention_s * 1000, condition, error, settings.max_dead
        reply = await self.connection.run_acknowledged(END, where.prefix, *arguments)
        if reply[0] not in (1, 2):
            return None
        _, ended_by, next_index, readers = reply
        await wakeups.publish(self.connection, [(LogSlice(request_id=request_id, first_index=next_index), readers)])
        return parse_finish_reason(ended_by.decode())


async def expire_engine(broker: Broker, engine_id: str) -> None:
    """Reclaims at once what an engine owns whose process is known to be dead. Unavailable.

    `engine_id` is an engine's whole id, or its name without the boot nonce: then every boot of that name is meant, so
    call this before the next one starts.
    """
    calls = []
    for name in await broker.directory.names():
        for where in await broker.directory.all_partitions(name):
            arguments = engine_id, keys.doorbell(name), where.number, broker.settings.control_ms
            calls.append(Call(EXPIRE, where.prefix, arguments))
    await broker.connection.run_many(calls)
