"""Bench requests over gRPC."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import grpc
from pagestream.v1 import inference_pb2, inference_pb2_grpc

from pagestream_cli.bench.load import AnswerError, BenchRequest, ResponseMeasurement
from pagestream_cli.client.endpoint import Endpoint

CHANNELS_EACH = 4
"""Connections to one gateway: HTTP/2 servers limit the streams of a connection (100 is usual)."""


class GrpcClient:
    """Send Generate calls to the gateways in turn."""

    def __init__(self, targets: tuple[str, ...], endpoint: Endpoint, model: str, temperature: float) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [_channel(target, endpoint, options) for _ in range(CHANNELS_EACH) for target in targets]
        self._metadata = [(name.lower(), value) for name, value in endpoint.headers.items()]
        self._model = model
        self._temperature = temperature
        self._next = 0

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()

    async def ask(self, request: BenchRequest, measurement: ResponseMeasurement) -> None:
        """Send a request and record its answer in the measurement.

        Raises:
            AnswerError: the call failed.
        """
        stub = inference_pb2_grpc.InferenceStub(self._channels[self._next % len(self._channels)])
        self._next += 1
        try:
            async for response in stub.Generate(self._message(request), metadata=self._metadata):
                note_chunk(response.chunk, measurement)
        except grpc.aio.AioRpcError as error:
            raise AnswerError(f"grpc {error.code().name}", error.details() or "") from error
        if not measurement.done:
            raise AnswerError("incomplete", "the stream ended without usage")

    def _message(self, request: BenchRequest) -> inference_pb2.GenerateRequest:
        sampling = inference_pb2.SamplingParams(
            max_tokens=request.max_tokens, temperature=self._temperature, ignore_eos=request.ignore_eos
        )
        message = inference_pb2.GenerateRequest(model=self._model, sampling=sampling)
        if isinstance(request.prompt, str):
            message.prompt = request.prompt
        else:
            message.prompt_token_ids.ids.extend(request.prompt)
        return message


def note_chunk(chunk: inference_pb2.TokenChunk, measurement: ResponseMeasurement) -> None:
    """Record a chunk in the measurement.

    Raises:
        AnswerError: the chunk is an error.
    """
    if chunk.HasField("error"):
        raise AnswerError("stream error", f"{chunk.error.code}: {chunk.error.message}")
    if chunk.token_ids:
        measurement.times_s.append(time.perf_counter() - measurement.began_s)
    if chunk.HasField("usage"):
        measurement.output_tokens, measurement.input_tokens, measurement.done = (
            chunk.usage.completion_tokens,
            chunk.usage.prompt_tokens,
            True,
        )


def _channel(target: str, endpoint: Endpoint, options: Sequence[tuple[str, int]]) -> grpc.aio.Channel:
    if not endpoint.urls[0].startswith("https:"):
        return grpc.aio.insecure_channel(target, options=options)
    authorities = None if endpoint.ca_file is None else Path(endpoint.ca_file).read_bytes()
    return grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(authorities), options=options)
