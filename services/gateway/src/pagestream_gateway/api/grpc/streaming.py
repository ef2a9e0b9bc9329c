"""Streams of a request's log, one message for each run of entries."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.records_pb2 import LogEntry, RequestSpec

from pagestream_gateway.api.failures import fields_at_fault
from pagestream_gateway.api.runs import Run, split_runs
from pagestream_gateway.core.calls import Call
from pagestream_gateway.core.gateway import Gateway

Context = grpc.aio.ServicerContext[bytes, bytes]


class ChunkStream:
    """Writes a request's log from an index.

    A message of live entries is handed to gRPC as they come. Its completion, which means that the client's window had
    room, is not waited for but looked at when the next entries come: where it is not there yet, they wait in the
    read's buffer, and the call's task waits for both.
    """

    def __init__(
        self,
        gateway: Gateway,
        context: Context,
        spec: RequestSpec,
        call: Call,
        *,
        next_index: int,
        message: type[api.GenerateResponse] | type[api.ResumeResponse],
    ) -> None:
        """`next_index`: of the first entry to write."""
        self._gateway = gateway
        self._spec = spec
        self._call = call
        self._next_index = next_index
        self._message = message
        self._writes = OverlappedWrites(context)

    async def write(self, digest: str) -> None:
        """Write up to the end of the log; `digest` is that of the log before the first entry, "" for unknown."""
        follow = self._gateway.requests.follow
        with self._gateway.streams.entered():
            try:
                async with aclosing(
                    follow(self._spec, from_index=self._next_index, digest=digest, sink=self._pass_on)
                ) as batches:
                    async for batch in batches:
                        for run in self._take(split_runs(self._next_index, batch)):
                            await self._writes.write(self._response(run))
                await self._writes.flush()
            finally:
                self._writes.close()

    def _pass_on(self, entries: Sequence[LogEntry]) -> bool:
        """Write live entries at once, where gRPC has taken those before; see Sink."""
        if not self._writes.is_ready:
            return False
        runs = split_runs(self._next_index, entries)
        if len(runs) != 1:
            return False
        self._writes.begin(self._response(*self._take(runs)))
        return True

    def _take(self, runs: list[Run]) -> list[Run]:
        """Count runs that are about to be written."""
        self._next_index = runs[-1].next_index
        self._call.tokens(sum(len(run.token_ids) for run in runs))
        return runs

    def _response(self, run: Run) -> Any:
        response = self._message()
        _fill_chunk(response.chunk, self._spec.request_id, run)
        return response


class OverlappedWrites:
    """Writes messages to a call, one at a time; the last one's completion may be outstanding.

    A write of grpc.aio is a coroutine that starts an operation and waits for its future. `begin` runs it up to there,
    as a task would, and the next write, or `close`, the rest.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._write: Coroutine[Any, Any, None] | None = None
        self._future: asyncio.Future[Any] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the last message has been taken, so that `begin` may be called."""
        return self._future is None or self._future.done()

    def begin(self, message: Any) -> None:
        """Begin to write a message; only where `is_ready`. Raises what the write before has failed with."""
        self._end()
        write = self._context.write(message)
        try:
            future = write.send(None)
        except StopIteration:
            return
        future._asyncio_future_blocking = False  # as a task does that will await it
        self._write, self._future = write, future

    async def write(self, message: Any) -> None:
        """Write a message, after those before."""
        await self.flush()
        await self._context.write(message)

    async def flush(self) -> None:
        """Wait until the last message has been taken."""
        if self._future is not None:
            await asyncio.wait((self._future,))
            self._end()

    def close(self) -> None:
        """Give up what is outstanding."""
        write, future = self._write, self._future
        self._write = self._future = None
        if future is not None and not future.cancel() and not future.cancelled():
            future.exception()  # of a call that has ended
        if write is not None:
            write.close()

    def _end(self) -> None:
        """Run the rest of the last write, whose future is done."""
        write, self._write, self._future = self._write, None, None
        if write is not None:
            try:
                write.send(None)
            except StopIteration:
                return
            raise RuntimeError("grpc.aio waits twice in a write")


def _fill_chunk(chunk: api.TokenChunk, request_id: str, run: Run) -> None:
    """Write a run into an empty chunk; the chunk of the log's end is the one with the usage.

    In place: a message that is given to another one's constructor is copied, for each token of each stream.
    """
    chunk.request_id = request_id
    chunk.next_index = run.next_index
    chunk.digest = run.digest
    chunk.choice = run.choice
    chunk.token_ids.extend(run.token_ids)
    chunk.text = run.text
    if run.logprobs:
        chunk.logprobs.extend(run.logprobs)
    if run.prompt_end:
        chunk.prompt_logprobs.extend(run.prompt_logprobs)
        chunk.embedding = run.embedding
    if run.finish is not None:
        chunk.finish_reason = run.finish.reason
        chunk.stop_reason = run.finish.stop_reason
    if run.end is not None:
        chunk.usage.CopyFrom(run.end.usage)
        if run.end.reason == api.FINISH_REASON_ERROR:
            chunk.finish_reason = api.FINISH_REASON_ERROR
        if run.end.HasField("error"):
            chunk.error.CopyFrom(run.end.error)
            if names := fields_at_fault(run.end.error):
                chunk.error.field = f"sampling.{names[0]}"
