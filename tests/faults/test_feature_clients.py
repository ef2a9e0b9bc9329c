"""The harness' clients detect everything that a stream can do wrong."""

import copy
import json

import pytest
from pagestream.v1 import inference_pb2 as pb
from support.faults.feature_clients import ChoiceTranscript, GrpcClient, SseClient, StreamBrokenError, Transcript
from support.faults.feature_rows import FEATURE_ROWS


def sample() -> Transcript:
    result = Transcript(usage=(3, 2), next_index=4, digest="d")
    result.choices[0] = ChoiceTranscript([5, 6], "ab", [[(5, -0.5, 1, "a")], [(6, -0.25, 1, "b")]], "length")
    return result


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", [5, 7]),
        ("text", "a"),
        ("logprobs", [[(5, -0.5, 1, "a")], [(6, -0.2500001, 1, "b")]]),
        ("finish_reason", "stop"),
    ],
)
def test_any_difference_in_a_choice_is_named(name: str, value: object) -> None:
    other = copy.deepcopy(sample())
    assert sample().differences(other) == []
    setattr(other.choices[0], name, value)
    [difference] = sample().differences(other)
    assert difference.startswith(f"{name} of choice 0")


@pytest.mark.parametrize(("name", "value"), [("usage", (3, 3)), ("next_index", 5), ("digest", "e")])
def test_any_difference_of_the_log_is_named(name: str, value: object) -> None:
    other = sample()
    setattr(other, name, value)
    [difference] = sample().differences(other)
    assert difference.startswith(f"{name}:")


def test_a_choice_that_is_missing_is_a_difference() -> None:
    assert sample().differences(Transcript(usage=(3, 2), next_index=4, digest="d"))


def chunk(next_index: int, *, request_id: str = "r", error: str = "") -> pb.TokenChunk:
    result = pb.TokenChunk(request_id=request_id, next_index=next_index, digest="d", token_ids=[1], text="x")
    if error:
        result.error.code = error
    return result


def grpc_client() -> GrpcClient:
    client = GrpcClient(FEATURE_ROWS[0], [""], model="demo", key="k")
    client._take(chunk(1))
    return client


@pytest.mark.parametrize(
    "wrong",
    [chunk(1), chunk(3), chunk(2, request_id="other"), chunk(2, error="quarantined")],
    ids=["repeated", "skipped", "another request", "an error"],
)
def test_grpc_detects_an_invalid_stream(wrong: pb.TokenChunk) -> None:
    client = grpc_client()
    with pytest.raises(StreamBrokenError):
        client._take(wrong)
    assert client.transcript.next_index == 1


def test_sse_detects_an_invalid_stream() -> None:
    client = SseClient(FEATURE_ROWS[0], [""], model="demo", key="k")
    client.request_id = "r"

    def data(position: str) -> str:
        choice = {"index": 0, "text": "x", "finish_reason": None}
        return json.dumps({"choices": [choice], "stream_position": position})

    client._take(data("r/2/d"))
    for position in ("r/2/d", "r/1/d", "other/3/d"):
        with pytest.raises(StreamBrokenError):
            client._take(data(position))
    with pytest.raises(StreamBrokenError, match="digest_mismatch"):
        client._take(json.dumps({"error": {"code": "digest_mismatch"}, "stream_position": "r/2/d"}))
    client._take(json.dumps({"error": {"code": "unavailable"}, "stream_position": "r/2/d"}))
    assert client.transcript.choices[0].text == "x"
