"""The answer that is a single JSON body, within the memory that all such answers of a process share."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator
from contextlib import aclosing

from pagestream.v1.records_pb2 import LogEnd
from pagestream_streams.errors import DigestMismatch, StreamsError
from pagestream_streams.tasks import ByteBudget, cancel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagestream_gateway.calls import OK
from pagestream_gateway.error_codes import error_report
from pagestream_gateway.errors import AnswerTooLarge, GatewayError, GenerationFailed, Overloaded
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.openai.errors import error_response, log_unexpected
from pagestream_gateway.streams.events import (
    START,
    AnswerBody,
    LogAnswer,
    Reading,
    Run,
    failure,
    is_failed,
    learn_tokens,
)

_PIECE_BYTES = 64 * 1024  # handed to the server at once
STALL_S = 5.0  # without a piece taken: the rest is dropped, and read again when the client reads on
_TURN_S = 30.0  # a sender that others wait for must be fast enough to be done in; else the rest is dropped alike
_LEAST_PART_BYTES = 4 * _PIECE_BYTES  # of the rest that is read again while others wait
_BLANK = b"\n"  # which JSON allows before a value
RETRY_AFTER_S = 5.0


class BudgetShare:
    """What one answer holds of the budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> bool:
        """Hold more; return False, and hold nothing, where there is no room."""
        if self.budget.try_acquire(num_bytes - self.num_bytes):
            self.num_bytes = num_bytes
            return True
        # Wait for room with none held: two answers that each hold a part would wait for each other for ever.
        self.release()
        return False

    async def wait_for(self, num_bytes: int, limit_s: float) -> None:
        """Hold so much once there is room for it. TimeoutError after `limit_s` seconds."""
        async with asyncio.timeout(limit_s):
            await self.budget.acquire(num_bytes)
        self.num_bytes = num_bytes

    def shrink_to(self, num_bytes: int) -> None:
        """Hold less."""
        self.budget.release(self.num_bytes - num_bytes)
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Hold nothing."""
        self.budget.release(self.num_bytes)
        self.num_bytes = 0


class WholeAnswer(LogAnswer):
    """One JSON body, once the log has ended.

    It is built while the log is followed, as far as there is room. Without room, or while the client does not take
    it, nothing is held: the log is read again. So it is where the client is slow and others wait.
    """

    def __init__(self, gateway: Gateway, reading: Reading) -> None:
        super().__init__(gateway, reading)
        self._share = BudgetShare(gateway.answer_budget)
        self._fingerprint = ""
        """Of the engine, where a wake-up told it."""
        self._has_begun = False
        """Whether status and headers are out before the body is known."""
        self._has_body = False
        self._beginning = asyncio.Lock()

    @property
    def silence_s(self) -> float:
        """Return after how many seconds of silence blanks begin, and then how often they follow."""
        stream = self._gateway.settings.stream
        if self._has_begun or stream.whole_answer_blanks_after_s is None:
            return stream.keep_alive_s
        return stream.whole_answer_blanks_after_s

    async def keep_alive(self, send: Send) -> None:
        """Begin the answer, and send a blank, where the settings ask for it and the body is still to come."""
        if self._gateway.settings.stream.whole_answer_blanks_after_s is None:
            return
        async with self._beginning:
            if self._has_body:
                return
            if not self._has_begun:
                self._has_begun = True
                headers = [*self._json_headers(), (b"x-accel-buffering", b"no")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": _BLANK, "more_body": True})

    def _json_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", b"application/json"), *self.header_pairs()]

    async def write(self, scope: Scope, receive: Receive, send: Send) -> str:
        """Write the body, or the error that the log or this gateway ended with; return the outcome."""
        if self._writer.logprobs.is_asked:
            await learn_tokens(self._gateway, self._writer)
        try:
            try:
                with self._gateway.streams.entered():
                    body, end = await self._follow_log()
                fingerprint = self._fingerprint or await self._gateway.requests.fingerprint(self._reading.spec)
                self._writer.set_fingerprint(fingerprint)
                body.set_fingerprint(fingerprint)
            except (GatewayError, StreamsError) as error:
                log_unexpected(error, self._request_id)
                async with self._beginning:
                    self._has_body = True
                if not self._has_begun:  # else the body is not complete, so the server closes the connection
                    await self.refusal(error)(scope, receive, send)
                return error_report(error).code
            return await self._send(send, list(body.serialize(end)), end)
        finally:
            self._share.release()

    def refusal(self, error: Exception) -> Response:
        """Return the answer to an error that came after the request's acceptance."""
        return error_response(error, self.request_headers())

    # -- build the body --

    async def _follow_log(self) -> tuple[AnswerBody, LogEnd]:
        """Follow the log to its end, and build the body: meanwhile where there is room, else afterwards."""
        num_bytes = self._reading.body.empty_bytes(self._writer)
        body = self._reading.body(self._writer.again()) if self._share.grow_to(num_bytes) else None
        async with aclosing(self._runs()) as batches:
            async for runs in batches:
                self._reading.call.tokens(sum(len(run.token_ids) for run in runs))
                for run in runs:
                    if run.end is not None:
                        return await self._built(body, run.end, num_bytes)
                    num_bytes += self._reading.body.size_of(self._writer, run)
                    if body is not None:
                        body.add(run)
                if body is not None and not self._share.grow_to(body.num_bytes):
                    body = None
                if body is None and num_bytes > self._share.budget.limit_bytes:
                    raise AnswerTooLarge(self._request_id, self._share.budget.limit_bytes)
        raise GenerationFailed("log_without_end", "the log ended without its finish record")

    async def _built(self, body: AnswerBody | None, end: LogEnd, num_bytes: int) -> tuple[AnswerBody, LogEnd]:
        self.check_end(end)
        return (body, end) if body is not None else (await self._read_again(num_bytes), end)

    def check_end(self, end: LogEnd) -> None:
        """Raise the error of a log that ended with one."""
        if is_failed(self._reading.spec, end):
            raise failure(self._reading.spec, end)

    async def _read_again(self, num_bytes: int) -> AnswerBody:
        """Build the body from the log, which has ended."""
        digest, limit_s = self._position.digest, self._gateway.settings.stream.whole_answer_wait_s
        try:
            await self._share.wait_for(num_bytes, limit_s)
        except TimeoutError as error:
            raise Overloaded(
                f"the answer is complete, but other answers that are not streamed have used this gateway's memory "
                f"for {limit_s:g} s; read it as events from GET /v1/requests/{self._request_id}/events, or stream",
                RETRY_AFTER_S,
            ) from error
        self._position = START
        body = self._reading.body(self._writer.again())
        async with aclosing(self._runs()) as batches:
            async for runs in batches:
                for run in runs:
                    if run.end is None:
                        body.add(run)
        if self._position.digest != digest:
            raise DigestMismatch(self._request_id, self._position.next_index)
        return body

    async def _runs(self) -> AsyncGenerator[list[Run], None]:
        async with aclosing(self.follow(on_engine=self._set_fingerprint)) as batches:
            async for batch in batches:
                runs = self._writer.split(self._position.next_index, batch)
                self._advance(runs[-1])
                yield runs

    def _set_fingerprint(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    # -- send it --

    async def _send(self, send: Send, parts: list[bytes], end: LogEnd) -> str:
        """Send the body in pieces; return the outcome."""
        num_bytes, sent = sum(map(len, parts)), 0
        async with self._beginning:
            self._has_body = True
        if not self._has_begun:
            headers = [(b"content-length", str(num_bytes).encode()), *self._json_headers()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        pieces, parts = _pieces(parts, 0), []
        now = asyncio.get_running_loop().time
        while True:
            began = now()
            taken, stalled = await self._send_pieces(pieces, send)
            sent, rate = sent + taken, taken / max(now() - began, STALL_S)
            pieces = iter(())
            self._share.release()
            if stalled is not None:
                await _result(stalled)
            if sent == num_bytes:
                break
            try:
                with self._gateway.streams.entered():
                    pieces = await self._rest(sent, num_bytes, end, rate)
            except (GatewayError, StreamsError) as error:
                log_unexpected(error, self._request_id)
                return error_report(error).code  # the body is not complete, so the server closes the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return OK

    async def _rest(self, sent: int, num_bytes: int, end: LogEnd, rate: float) -> Iterator[bytes]:
        """Read the body again; return what follows the first `sent` bytes.

        While others wait only as much as a client that takes `rate` bytes a second has in half of _TURN_S.
        """
        budget = self._share.budget
        parts = list((await self._read_again(min(num_bytes, budget.limit_bytes))).serialize(end))
        pieces = _pieces(parts, sent)
        if not budget.is_waited_for:
            return pieces
        most, part, part_bytes = max(_LEAST_PART_BYTES, rate * _TURN_S / 2), list[bytes](), 0
        while part_bytes < most and (piece := next(pieces, None)) is not None:
            part.append(piece)
            part_bytes += len(piece)
        self._share.shrink_to(min(part_bytes, self._share.num_bytes))
        return iter(part)

    async def _send_pieces(self, pieces: Iterator[bytes], send: Send) -> tuple[int, asyncio.Task[None] | None]:
        """Send pieces until all are sent, the client has stopped reading, or it is slow and others wait for memory.

        Returns how many bytes are sent, and where the client has stopped reading, the send that waits for it.
        """
        now = asyncio.get_running_loop().time
        taken, since, taken_before = 0, now(), 0
        for piece in pieces:
            message = {"type": "http.response.body", "body": piece, "more_body": True}
            sending = asyncio.create_task(_awaited(send(message)), name="send a body")
            try:
                await asyncio.wait({sending}, timeout=STALL_S)
            except asyncio.CancelledError:
                await cancel(sending)
                raise
            taken += len(piece)
            if not sending.done():
                return taken, sending
            sending.result()
            if (passed := now() - since) >= STALL_S:
                is_slow = (taken - taken_before) * _TURN_S < self._share.num_bytes * passed
                if is_slow and self._share.budget.is_waited_for:
                    break
                since, taken_before = now(), taken
        return taken, None


async def _awaited(sending: Awaitable[None]) -> None:
    await sending


async def _result(task: asyncio.Task[None]) -> None:
    """Wait for a task that is cancelled with its waiter."""
    try:
        await task
    finally:
        await cancel(task)


def _pieces(parts: Iterable[bytes], start: int) -> Iterator[bytes]:
    """Yield the concatenation of parts from a byte on, in pieces of _PIECE_BYTES."""
    piece = bytearray()
    for part in parts:
        for place in range(start, len(part), _PIECE_BYTES):
            piece += part[place : place + _PIECE_BYTES]
            if len(piece) >= _PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
        start = max(0, start - len(part))
    if piece:
        yield bytes(piece)
