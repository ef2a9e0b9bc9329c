"""What `helm test` runs in the gateway's image: a caller without a key is refused, one with a key gets token streams.

Reads SMOKE_HTTP_URL, SMOKE_GRPC_TARGET, SMOKE_LIMIT_S (seconds for all of it), and where they are set SMOKE_KEYS_ASKED
("true": a call without a key must be refused), SMOKE_API_KEY (without one nothing else is tested where keys are asked
for), SMOKE_MODEL (else the first that is listed), SMOKE_CA_FILE (TLS). Exits with 1 and a sentence at the first thing
that is not so.
"""

import http.client
import json
import os
import ssl
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from pagestream.v1 import inference_pb2
from pagestream.v1.inference_pb2_grpc import InferenceStub

_PROMPT = "Once upon a time"
_MAX_TOKENS = 16
_RETRY_S = 1.0


class SmokeError(Exception):
    """Something is not as it must be."""


@dataclass(frozen=True)
class Place:
    """Where and as whom to call."""

    url: str
    target: str
    limit_s: float
    api_key: str
    model: str
    ca_file: str
    keys_asked: bool

    @property
    def authorization(self) -> str:
        """The header's value."""
        return f"Bearer {self.api_key}"


def main() -> None:
    """Runs the checks that this deployment allows."""
    environ = os.environ
    place = Place(
        url=environ["SMOKE_HTTP_URL"],
        target=environ["SMOKE_GRPC_TARGET"],
        limit_s=float(environ.get("SMOKE_LIMIT_S", "300")),
        api_key=environ.get("SMOKE_API_KEY", ""),
        model=environ.get("SMOKE_MODEL", ""),
        ca_file=environ.get("SMOKE_CA_FILE", ""),
        keys_asked=environ.get("SMOKE_KEYS_ASKED", "") == "true",
    )
    try:
        check(place)
    except SmokeError as error:
        sys.exit(f"smoke: {error}")


def check(place: Place) -> None:
    """All that can be checked. Raises SmokeError."""
    end = time.monotonic() + place.limit_s
    if place.keys_asked:
        _with_retries(end, "an HTTP call without a key to be refused", lambda: _refused_by_http(place))
        _with_retries(end, "a gRPC call without a key to be refused", lambda: _refused_by_grpc(place))
        _say("a call without a key is 401 and UNAUTHENTICATED")
        if not place.api_key:
            _say("no key was given (smoke.existingSecret): streams are not tested")
            return
    model = place.model or _with_retries(end, "a model to be listed", lambda: _first_model(place))
    text = _with_retries(end, f"a stream of {model} over HTTP", lambda: _http_stream(place, model))
    _say(f"{model} over HTTP, twice the same from the log: {text!r}")
    text = _with_retries(end, f"a stream of {model} over gRPC", lambda: _grpc_stream(place, model, end))
    _say(f"{model} over gRPC: {text!r}")


def _say(text: str) -> None:
    sys.stdout.write(f"smoke: {text}\n")
    sys.stdout.flush()


def _with_retries(end: float, what: str, attempt: Any) -> Any:
    """Repeat an attempt until `end` while a part may not be up yet; a permanent error raises SmokeError at once."""
    while True:
        try:
            return attempt()
        except (OSError, http.client.HTTPException, grpc.RpcError, _NotYetError) as error:
            if time.monotonic() > end or _is_final(error):
                raise SmokeError(f"waiting for {what} failed: {error}") from error
            time.sleep(_RETRY_S)


class _NotYetError(Exception):
    """An answer that a deployment which is starting may give."""


def _is_final(error: Exception) -> bool:
    """Whether waiting can't help."""
    wrong = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    return isinstance(error, grpc.RpcError) and error.code() in wrong


def _refused_by_http(place: Place) -> None:
    status, _, body = _call(place, "GET", "/v1/models", with_key=False)
    if status != 401:
        _raise_for(status, body, "GET /v1/models without a key: 401 was expected")


def _refused_by_grpc(place: Place) -> None:
    with _channel(place) as channel:
        try:
            stub = InferenceStub(channel)  # type: ignore[no-untyped-call]
            stub.ListModels(inference_pb2.ListModelsRequest(), timeout=10)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return
            raise
    raise SmokeError("ListModels without a key was answered; UNAUTHENTICATED was expected")


def _first_model(place: Place) -> str:
    status, _, body = _call(place, "GET", "/v1/models")
    if status != 200:
        _raise_for(status, body, "GET /v1/models")
    names: list[str] = [model["id"] for model in json.loads(body)["data"]]
    if not names:
        raise _NotYetError("no engine has published a model yet")
    return names[0]


def _http_stream(place: Place, model: str) -> str:
    question = {"model": model, "prompt": _PROMPT, "max_tokens": _MAX_TOKENS, "temperature": 0, "stream": True}
    status, request_id, body = _call(place, "POST", "/v1/completions", json.dumps(question))
    if status != 200:
        _raise_for(status, body, "POST /v1/completions")
    text = _text_of(body)
    status, _, body = _call(place, "GET", f"/v1/requests/{request_id}/events?from=0")
    if status != 200 or _text_of(body) != text:
        raise SmokeError(f"the stream {text!r}, read again from the log, is {status}: {body[:500]!r}")
    return text


def _text_of(body: str) -> str:
    """The text of a stream of completion events that ended as it must."""
    data = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    if not data or data[-1] != "[DONE]":
        raise SmokeError(f"the stream did not end with [DONE]: {body[-500:]!r}")
    events: Iterator[dict[str, Any]] = (json.loads(line) for line in data[:-1])
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    if not text:
        raise SmokeError("the stream held no text")
    return text


def _grpc_stream(place: Place, model: str, end: float) -> str:
    request = inference_pb2.GenerateRequest(
        model=model, prompt=_PROMPT, sampling=inference_pb2.SamplingParams(max_tokens=_MAX_TOKENS, temperature=0)
    )
    with _channel(place) as channel:
        limit_s = max(end - time.monotonic(), 1)
        stub = InferenceStub(channel)  # type: ignore[no-untyped-call]
        answers = stub.Generate(request, timeout=limit_s, metadata=_metadata(place))
        chunks: Sequence[inference_pb2.TokenChunk] = [answer.chunk for answer in answers]
    finished = {inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH}
    if not any(chunk.finish_reason in finished for chunk in chunks):
        raise SmokeError(f"the gRPC stream did not finish: {chunks[-1:]}")
    return "".join(chunk.text for chunk in chunks)


def _call(place: Place, method: str, path: str, body: str = "", *, with_key: bool = True) -> tuple[int, str, str]:
    """Status, request id and whole body of a call."""
    where = urlsplit(place.url)
    connection: http.client.HTTPConnection
    if where.scheme == "https":
        context = ssl.create_default_context(cafile=place.ca_file or None)
        connection = http.client.HTTPSConnection(where.netloc, timeout=place.limit_s, context=context)
    else:
        connection = http.client.HTTPConnection(where.netloc, timeout=place.limit_s)
    headers = {"Content-Type": "application/json"}
    if with_key and place.api_key:
        headers["Authorization"] = place.authorization
    try:
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("X-Request-Id", ""), answer.read().decode()
    finally:
        connection.close()


def _raise_for(status: int, body: str, what: str) -> None:
    """Busy and starting gateways are asked again."""
    problem = f"{what}: {status} {body[:500]}"
    if status in (404, 429) or status >= 500:
        raise _NotYetError(problem)
    raise SmokeError(problem)


def _metadata(place: Place) -> tuple[tuple[str, str], ...]:
    return (("authorization", place.authorization),) if place.api_key else ()


def _channel(place: Place) -> grpc.Channel:
    if place.url.startswith("https:"):
        roots = Path(place.ca_file).read_bytes() if place.ca_file else None
        return grpc.secure_channel(place.target, grpc.ssl_channel_credentials(roots))
    return grpc.insecure_channel(place.target)


if __name__ == "__main__":
    main()
