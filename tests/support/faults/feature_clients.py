"""Clients of the kill matrix: they reconnect whenever their stream breaks, and record all that they received."""

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
from pagestream_streams.protocol import finish_reason_name
from support.faults.feature_rows import FeatureRow, grpc_request, http_body

RETRY_S = 0.1
LIMIT_S = 240.0
SILENCE_LIMIT_S = 20.0  # above the longest cut: after more silence a client tries another gateway
RETRYABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
RETRYABLE_HTTP = {httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.TOO_MANY_REQUESTS}
RETRYABLE_CODES = {"unavailable", "gateway_stopping", "storage_full"}
CHANNEL_OPTIONS = (
    # Otherwise a process' channels share a connection to an address, and its back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
)


class StreamBrokenError(AssertionError):
    """A stream repeated, skipped or contradicted itself."""


@dataclass
class ChoiceTranscript:
    """What was received of one choice."""

    token_ids: list[int] = field(default_factory=list)
    """Empty over HTTP, which has no token ids; the digest is compared there."""
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str = ""
    vector: list[float] = field(default_factory=list)


@dataclass
class Transcript:
    """All that a client received of its stream."""

    choices: defaultdict[int, ChoiceTranscript] = field(default_factory=lambda: defaultdict(ChoiceTranscript))
    usage: tuple[int, int] | None = None
    next_index: int = 0
    digest: str = ""

    def differences(self, other: Transcript) -> list[str]:
        """Describe all that is not equal."""
        found = [
            f"{name} of choice {index}: {getattr(mine, name)!r} is not {getattr(theirs, name)!r}"
            for index, mine, theirs in ((i, self.choices[i], other.choices[i]) for i in {*self.choices, *other.choices})
            for name in ("token_ids", "text", "logprobs", "finish_reason", "vector")
            if getattr(mine, name) != getattr(theirs, name)
        ]
        found += [
            f"{name}: {getattr(self, name)!r} is not {getattr(other, name)!r}"
            for name in ("usage", "next_index", "digest")
            if getattr(self, name) != getattr(other, name)
        ]
        return found


class FeatureClient(ABC):
    """Runs one feature row over one API."""

    api = ""

    def __init__(
        self, row: FeatureRow, addresses: Sequence[str], *, model: str, key: str, seed: int | None = None
    ) -> None:
        """`addresses` are the gateways', in the order in which they are tried; `key` is the idempotency key."""
        self.row = row
        self.transcript = Transcript()
        self.request_id = ""
        self.reconnects = 0
        self.is_done = False
        self.progress: list[float] = []
        self.started_at = time.monotonic()
        self._addresses = addresses
        self._model = model
        self._key = key
        self._seed = seed

    @property
    def name(self) -> str:
        """Row and API, for messages."""
        return f"{self.row.name} ({self.api})"

    async def run(self) -> Transcript:
        """Read to the end. StreamBrokenError where the stream contradicts itself; TimeoutError after LIMIT_S."""
        async with asyncio.timeout(LIMIT_S):
            for attempt in range(1_000_000):
                await self._read(self._addresses[attempt % len(self._addresses)])
                if self.is_done:
                    break
                self.reconnects += 1
                await asyncio.sleep(RETRY_S)
        for index, choice in self.transcript.choices.items():
            if self.row.finish is not None and choice.finish_reason != self.row.finish:
                raise StreamBrokenError(f"{self.name}: choice {index} ended by {choice.finish_reason!r}")
        return self.transcript

    def recovery_s(self, since: float) -> float | None:
        """Return the seconds from a time.monotonic() to the next event; None without one."""
        return next((at - since for at in self.progress if at > since), None)

    @abstractmethod
    async def _read(self, address: str) -> None:
        """Read from one gateway until the stream ends or breaks; errors that a retry may solve are suppressed."""


class GrpcClient(FeatureClient):
    """Calls Generate, then Resume."""

    api = "grpc"

    async def _read(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub = InferenceStub(channel)
            transcript = self.transcript
            if self.request_id:
                position = pb.ResumeRequest(
                    request_id=self.request_id, next_index=transcript.next_index, digest=transcript.digest
                )
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
        transcript, has_usage = self.transcript, chunk.HasField("usage")
        if chunk.HasField("error"):
            raise StreamBrokenError(f"{self.name}: {chunk.error.code}: {chunk.error.message}")
        finishes = chunk.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        entries = len(chunk.token_ids) + int(finishes) + int(has_usage)
        if chunk.next_index != transcript.next_index + entries:
            raise StreamBrokenError(
                f"{self.name}: {entries} entries after {transcript.next_index} can't end at {chunk.next_index}"
            )
        if chunk.token_ids or finishes:
            choice = transcript.choices[chunk.choice]
            choice.token_ids.extend(chunk.token_ids)
            choice.text += chunk.text
            choice.logprobs.extend(
                [(entry.token_id, entry.logprob, entry.rank, entry.text) for entry in logprobs.entries]
                for logprobs in chunk.logprobs
            )
            if finishes:
                choice.finish_reason = finish_reason_name(chunk.finish_reason)
        if has_usage:
            transcript.usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
            self.is_done = True
        transcript.next_index, transcript.digest = chunk.next_index, chunk.digest


class SseClient(FeatureClient):
    """Calls POST /v1/completions or /v1/chat/completions, then GET /v1/requests/ID/events with Last-Event-ID."""

    api = "sse"

    def __init__(
        self, row: FeatureRow, addresses: Sequence[str], *, model: str, key: str, seed: int | None = None
    ) -> None:
        super().__init__(row, addresses, model=model, key=key, seed=seed)
        self._position = ""

    async def _read(self, address: str) -> None:
        # Loading the certificate store takes longer than a stream, and there is no TLS here.
        async with httpx.AsyncClient(timeout=SILENCE_LIMIT_S, verify=False) as client:  # noqa: S501
            if self._position:
                request = client.build_request(
                    "GET",
                    f"{address}/v1/requests/{self.request_id}/events",
                    headers={"Last-Event-ID": self._position},
                )
            else:
                body = http_body(self.row, model=self._model, seed=self._seed)
                route = "/v1/chat/completions" if self.row.is_chat else "/v1/completions"
                request = client.build_request(
                    "POST", f"{address}{route}", json=body, headers={"Idempotency-Key": self._key}
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
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                self._take(line.removeprefix("data: "))

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.is_done = True
            return
        body = json.loads(data)
        if "error" in body:
            if body["error"]["code"] not in RETRYABLE_CODES:
                raise StreamBrokenError(f"{self.name}: {body['error']}")
            return
        self.progress.append(time.monotonic())
        position = body["stream_position"]
        request_id, index, digest = position.split("/")
        opens = (
            int(index) == self.transcript.next_index == 0
        )  # the event with the role or the echoed prompt, before the first entry
        if self.row.is_chat and opens:
            self._position = position
            return
        if self.row.echo and opens and not self._position:
            self.transcript.next_index = -1
        if request_id != self.request_id or int(index) <= self.transcript.next_index:
            raise StreamBrokenError(f"{self.name}: position {position} after {self._position}")
        self._position = position
        self.transcript.next_index, self.transcript.digest = int(index), "" if self.row.is_list else digest
        if body.get("usage"):
            self.transcript.usage = (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"])
        for choice in body["choices"]:
            transcript = self.transcript.choices[choice["index"]]
            transcript.text += choice["delta"].get("content") or "" if self.row.is_chat else choice["text"]
            logprobs = choice.get("logprobs")
            if logprobs:
                names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
                transcript.logprobs += list(zip(*(logprobs[name] for name in names), strict=True))
            transcript.finish_reason = choice["finish_reason"] or transcript.finish_reason


class VectorClient(FeatureClient):
    """Calls POST /v1/embeddings until it answers; the same key joins the same request."""

    api = "sse"

    async def _read(self, address: str) -> None:
        body = http_body(self.row, model=self._model)
        async with httpx.AsyncClient(timeout=SILENCE_LIMIT_S, verify=False) as client:  # noqa: S501
            with suppress(httpx.TransportError):
                headers = {"Idempotency-Key": self._key}
                response = await client.post(f"{address}/v1/embeddings", json=body, headers=headers)
                if response.status_code in RETRYABLE_HTTP:
                    return
                if response.status_code != httpx.codes.OK:
                    raise StreamBrokenError(f"{self.name}: {response.status_code}: {response.text}")
                self.progress.append(time.monotonic())
                answer, self.request_id = response.json(), response.headers["X-Request-Id"]
                view = (await client.get(f"{address}/v1/requests/{self.request_id}")).raise_for_status().json()
                self._take(answer, view)

    def _take(self, answer: dict[str, Any], view: dict[str, Any]) -> None:
        for each in answer["data"]:
            self.transcript.choices[each["index"]].vector = each["embedding"]
        self.transcript.usage = (answer["usage"]["prompt_tokens"], 0)
        # A vector that was appended twice would make the log longer.
        self.transcript.next_index = view["next_index"]
        self.is_done = True


def clients_of(row: FeatureRow) -> Sequence[type[FeatureClient]]:
    """Return the clients of the APIs that support the row."""
    if row.is_embedding:
        return (VectorClient,)
    return (SseClient,) if row.is_list else (GrpcClient, SseClient)
