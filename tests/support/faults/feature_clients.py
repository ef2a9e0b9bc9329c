"""Clients of the kill matrix: they come back wherever and however often their stream breaks, and forget nothing."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx
from pagestream.v1 import inference_pb2 as pb
from pagestream.v1.inference_pb2_grpc import InferenceStub
from support.clients.stream_clients import StreamBrokenError
from support.faults.feature_rows import FeatureRow, grpc_request, http_body

RETRY_S = 0.1
LIMIT_S = 90.0
SILENCE_LIMIT_S = 20.0  # above the longest cut: whoever is silent for longer is left for another gateway
RETRYABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}
RETRYABLE_HTTP = {httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.TOO_MANY_REQUESTS}
RETRYABLE_CODES = {"unavailable", "gateway_stopping"}
CHANNEL_OPTIONS = (
    # Else channels of one process share a connection to an address, and wait for its back-off together.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
)
FINISH_WORDS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass
class ChoiceSeen:
    """What came of one choice."""

    token_ids: list[int] = field(default_factory=list)
    """Over HTTP they are not told; the digest stands for them."""
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str = ""


@dataclass
class Seen:
    """What a client saw of its stream."""

    choices: defaultdict[int, ChoiceSeen] = field(default_factory=lambda: defaultdict(ChoiceSeen))
    usage: tuple[int, int] | None = None
    next_index: int = 0
    digest: str = ""

    def differences(self, other: Seen) -> list[str]:
        """Names of what is not equal."""
        found = [
            f"{name} of choice {index}: {getattr(mine, name)!r} is not {getattr(theirs, name)!r}"
            for index, mine, theirs in ((i, self.choices[i], other.choices[i]) for i in {*self.choices, *other.choices})
            for name in ("token_ids", "text", "logprobs", "finish_reason")
            if getattr(mine, name) != getattr(theirs, name)
        ]
        found += [
            f"{name}: {getattr(self, name)!r} is not {getattr(other, name)!r}"
            for name in ("usage", "next_index", "digest")
            if getattr(self, name) != getattr(other, name)
        ]
        return found


class FeatureClient(ABC):
    """Runs one row over one API."""

    api = ""

    def __init__(
        self, row: FeatureRow, places: Sequence[str], *, model: str, key: str, seed: int | None = None
    ) -> None:
        """`places` are the gateways' addresses; the first is tried first. `key` makes retries join the first try."""
        self.row = row
        self.seen = Seen()
        self.request_id = ""
        self.reconnects = 0
        self.is_done = False
        self.progress: list[float] = []
        self.started_at = time.monotonic()
        self._places = places
        self._model = model
        self._key = key
        self._seed = seed

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.row.name} ({self.api})"

    async def run(self) -> Seen:
        """Read to the end. StreamBrokenError where the stream contradicts itself; TimeoutError."""
        async with asyncio.timeout(LIMIT_S):
            for attempt in range(1_000_000):
                await self._read(self._places[attempt % len(self._places)])
                if self.is_done:
                    break
                self.reconnects += 1
                await asyncio.sleep(RETRY_S)
        for index, choice in self.seen.choices.items():
            if choice.finish_reason != self.row.finish:
                raise StreamBrokenError(f"{self.name}: choice {index} ended by {choice.finish_reason!r}")
        return self.seen

    def recovery_s(self, since: float) -> float | None:
        """Seconds from a moment to what came next; None where nothing came after it."""
        return next((at - since for at in self.progress if at > since), None)

    @abstractmethod
    async def _read(self, place: str) -> None:
        """Read from one gateway as far as it goes; what is worth another try is swallowed."""


class GrpcClient(FeatureClient):
    """Generate, then Resume."""

    api = "grpc"

    async def _read(self, place: str) -> None:
        async with grpc.aio.insecure_channel(place, options=CHANNEL_OPTIONS) as channel:
            stub = InferenceStub(channel)
            seen = self.seen
            if self.request_id:
                position = pb.ResumeRequest(request_id=self.request_id, next_index=seen.next_index, digest=seen.digest)
                call = stub.Resume(position)
            else:
                call = stub.Generate(grpc_request(self.row, model=self._model, key=self._key, seed=self._seed))
            try:
                while True:
                    async with asyncio.timeout(SILENCE_LIMIT_S):
                        response = await call.read()
                    if response is grpc.aio.EOF:
                        return
                    self._take(response.chunk)
            except grpc.aio.AioRpcError as error:
                if error.code() not in RETRYABLE:
                    raise StreamBrokenError(f"{self.name}: {error.code().name}: {error.details()}") from error
            except TimeoutError:
                call.cancel()

    def _take(self, chunk: pb.TokenChunk) -> None:
        self.progress.append(time.monotonic())
        if self.request_id not in ("", chunk.request_id):
            raise StreamBrokenError(f"{self.name}: request id {self.request_id} became {chunk.request_id}")
        self.request_id = chunk.request_id
        seen, has_usage = self.seen, chunk.HasField("usage")
        if chunk.HasField("error"):
            raise StreamBrokenError(f"{self.name}: {chunk.error.code}: {chunk.error.message}")
        finishes = chunk.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        entries = len(chunk.token_ids) + int(finishes) + int(has_usage)
        if chunk.next_index != seen.next_index + entries:
            raise StreamBrokenError(
                f"{self.name}: {entries} entries after {seen.next_index} can't end at {chunk.next_index}"
            )
        if chunk.token_ids or finishes:
            choice = seen.choices[chunk.choice]
            choice.token_ids.extend(chunk.token_ids)
            choice.text += chunk.text
            choice.logprobs.extend(
                [(entry.token_id, entry.logprob, entry.rank, entry.text) for entry in logprobs.entries]
                for logprobs in chunk.logprobs
            )
            if finishes:
                choice.finish_reason = FINISH_WORDS.get(chunk.finish_reason, str(chunk.finish_reason))
        if has_usage:
            seen.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
            self.is_done = True
        seen.next_index, seen.digest = chunk.next_index, chunk.digest


class SseClient(FeatureClient):
    """POST /v1/completions or /v1/chat/completions, then GET /v1/requests/ID/events with Last-Event-ID."""

    api = "sse"

    def __init__(
        self, row: FeatureRow, places: Sequence[str], *, model: str, key: str, seed: int | None = None
    ) -> None:
        super().__init__(row, places, model=model, key=key, seed=seed)
        self._last_event_id = ""

    async def _read(self, place: str) -> None:
        # Without TLS here: to load what verifies certificates takes longer than a stream.
        async with httpx.AsyncClient(timeout=SILENCE_LIMIT_S, verify=False) as client:  # noqa: S501
            if self._last_event_id:
                request = client.build_request(
                    "GET",
                    f"{place}/v1/requests/{self.request_id}/events",
                    headers={"Last-Event-ID": self._last_event_id},
                )
            else:
                body = http_body(self.row, model=self._model, seed=self._seed)
                route = "/v1/chat/completions" if self.row.is_chat else "/v1/completions"
                request = client.build_request(
                    "POST", f"{place}{route}", json=body, headers={"Idempotency-Key": self._key}
                )
            with suppress(httpx.TransportError):
                response = await client.send(request, stream=True)
                try:
                    await self._follow(response)
                finally:
                    await response.aclose()

    async def _follow(self, response: httpx.Response) -> None:
        if response.status_code in RETRYABLE_HTTP:
            return
        if response.status_code != httpx.codes.OK:
            raise StreamBrokenError(f"{self.name}: {response.status_code}: {(await response.aread())!r}")
        self.request_id = response.headers["X-Request-Id"]
        event_id = data = ""
        async for line in response.aiter_lines():
            if line.startswith("id:"):
                event_id = line[3:].strip()
            elif line.startswith("data:"):
                data = line[5:].strip()
            elif not line and data:
                self._take(event_id, data)
                event_id = data = ""

    def _take(self, event_id: str, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        body = json.loads(data)
        if "error" in body:
            if body["error"]["code"] not in RETRYABLE_CODES:
                raise StreamBrokenError(f"{self.name}: {body['error']}")
            return
        self.progress.append(time.monotonic())
        request_id, index, digest = event_id.split("/")
        opens = int(index) == self.seen.next_index == 0  # the roles, or what is echoed: before the first entry
        if self.row.is_chat and opens:
            self._last_event_id = event_id
            return
        if self.row.echo and opens and not self._last_event_id:
            self.seen.next_index = -1
        if request_id != self.request_id or int(index) <= self.seen.next_index:
            raise StreamBrokenError(f"{self.name}: event {event_id} after {self._last_event_id}")
        self._last_event_id = event_id
        self.seen.next_index, self.seen.digest = int(index), "" if self.row.is_list else digest
        if body.get("usage"):
            self.seen.usage = (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
        for choice in body["choices"]:
            seen = self.seen.choices[choice["index"]]
            seen.text += choice["delta"].get("content") or "" if self.row.is_chat else choice["text"]
            logprobs = choice.get("logprobs")
            if logprobs:
                names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
                seen.logprobs += list(zip(*(logprobs[name] for name in names), strict=True))
            seen.finish_reason = choice["finish_reason"] or seen.finish_reason


def clients_of(row: FeatureRow) -> Sequence[type[FeatureClient]]:
    """The APIs that have the row."""
    return (SseClient,) if row.is_list else (GrpcClient, SseClient)
