"""Clients that read a stream to its end, resume it after lost connections, and check that it is contiguous."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import grpc.aio
import httpx
from pagestream.v1 import inference_pb2 as pb
from pagestream.v1.inference_pb2_grpc import InferenceStub

RETRY_S = 0.1
LIMIT_S = 60.0
RETRYABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN}


class StreamBrokenError(AssertionError):
    """A stream repeated, skipped or contradicted itself."""


@dataclass
class Outcome:
    """All that a client received of one request."""

    request_id: str = ""
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    reconnects: int = 0
    next_index: int = 0
    digest: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all choices so far."""
        return sum(len(tokens) for tokens in self.token_ids.values())

    def content(self) -> tuple[object, ...]:
        """Return what must be equal in two runs of the same request."""
        return self.token_ids, self.texts, self.finish_reasons, self.usage, self.next_index, self.digest


class GrpcReader:
    """Reads one generation over gRPC; after a lost connection it calls Resume at the next gateway."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = targets
        self.outcome = Outcome()

    async def run(self, request: pb.GenerateRequest) -> Outcome:
        """Read to the end. Raises StreamBrokenError, or the gRPC error that is not worth a retry."""
        async with asyncio.timeout(LIMIT_S):
            for attempt in range(10_000):
                target = self._targets[attempt % len(self._targets)]
                try:
                    await self._read(target, request)
                except grpc.aio.AioRpcError as error:
                    if error.code() not in RETRYABLE:
                        raise
                    if self.outcome.request_id:
                        self.outcome.reconnects += 1
                    await asyncio.sleep(RETRY_S)
                if self.outcome.usage is not None:
                    return self.outcome
        raise StreamBrokenError("the stream has no end")

    async def _read(self, target: str, request: pb.GenerateRequest) -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            stub = InferenceStub(channel)
            seen = self.outcome
            if seen.request_id:
                position = pb.ResumeRequest(request_id=seen.request_id, next_index=seen.next_index, digest=seen.digest)
                call = stub.Resume(position)
            else:
                call = stub.Generate(request)
            async for response in call:
                self._take(response.chunk)

    def _take(self, chunk: pb.TokenChunk) -> None:
        seen = self.outcome
        if seen.request_id not in ("", chunk.request_id):
            raise StreamBrokenError(f"request id changed from {seen.request_id} to {chunk.request_id}")
        seen.request_id = chunk.request_id
        finishes = chunk.finish_reason != pb.FINISH_REASON_UNSPECIFIED and not chunk.HasField("usage")
        entries = len(chunk.token_ids) + int(finishes) + int(chunk.HasField("usage"))
        if chunk.HasField("usage") and chunk.next_index == seen.next_index + entries + 1:
            finishes, entries = True, entries + 1  # the last choice's finish came along
        if chunk.next_index != seen.next_index + entries:
            raise StreamBrokenError(f"{entries} entries after {seen.next_index} can't end at {chunk.next_index}")
        if chunk.token_ids or finishes:
            seen.token_ids.setdefault(chunk.choice, []).extend(chunk.token_ids)
            seen.texts[chunk.choice] = seen.texts.get(chunk.choice, "") + chunk.text
        if finishes:
            seen.finish_reasons[chunk.choice] = pb.FinishReason.Name(chunk.finish_reason)
        if chunk.HasField("usage"):
            seen.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        seen.next_index, seen.digest = chunk.next_index, chunk.digest


class SseReader:
    """Reads one chat completion as server-sent events; resumes with Last-Event-ID at the next gateway."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self.request_id = ""
        self.position = ""
        self.text = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, int] | None = None
        self.indices: list[int] = []
        self.reconnects = 0
        self.is_done = False

    async def run(
        self, body: dict[str, object], *, on_event: Callable[["SseReader"], None] | None = None
    ) -> "SseReader":
        """Read to [DONE]."""
        async with asyncio.timeout(LIMIT_S):
            for attempt in range(10_000):
                url = self._urls[attempt % len(self._urls)]
                with suppress(httpx.TransportError):
                    await self._read(url, body, on_event)
                if self.is_done:
                    return self
                self.reconnects += 1 if self.request_id else 0
                await asyncio.sleep(RETRY_S)
        raise StreamBrokenError("the stream has no end")

    async def _read(self, url: str, body: dict[str, object], on_event: Callable[["SseReader"], None] | None) -> None:
        async with httpx.AsyncClient(timeout=30.0) as client:
            if self.request_id:
                path = f"{url}/v1/requests/{self.request_id}/events"
                headers = {"Last-Event-ID": self.position} if self.position else {}
                request = client.build_request("GET", path, headers=headers)
            else:
                request = client.build_request("POST", f"{url}/v1/chat/completions", json=body)
            response = await client.send(request, stream=True)
            try:
                if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                    return
                if response.status_code != httpx.codes.OK:
                    raise StreamBrokenError(f"{response.status_code}: {(await response.aread())!r}")
                self.request_id = response.headers["X-Request-Id"]
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    self._take(line.removeprefix("data: "))
                    if on_event is not None:
                        on_event(self)
            finally:
                await response.aclose()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        body = json.loads(data)
        self.position = body["stream_position"]
        self.indices.append(int(self.position.split("/")[1]))
        if body.get("usage"):
            self.usage = body["usage"]
        for choice in body["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason
