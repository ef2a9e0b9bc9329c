"""One stream over any number of calls, without a network: what is called next, and what is believed."""

import random
from collections.abc import Sequence

import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream_client import (
    Chunk,
    DataLoss,
    DeadlineExceeded,
    FinishReason,
    GenerationFailed,
    ModelNotFound,
    OffsetOutOfRange,
    Position,
    Quarantined,
    QueueFull,
    Reconnection,
    RequestNotFound,
    Unavailable,
)
from pagestream_client.grpc.stream_state import GrpcStreamState
from pagestream_client.retry import Code, Endpoints, Failure, RetryState

ID = "2a97516c-0000-0123456789abcdef0123456789abcdef"
AWAY = Failure(Code.UNAVAILABLE, "away")
LATE = Failure(Code.DEADLINE_EXCEEDED, "late")
TARGET = "a:1"


def full(retry_after_s: float) -> Failure:
    return Failure(Code.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", retry_after_s=retry_after_s)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def stream_state(
    start: api.GenerateRequest | Position | None = None, *, deadline_s: float | None = None
) -> tuple[GrpcStreamState, Clock]:
    clock, rng = Clock(), random.Random(0)
    retry = RetryState(Endpoints([TARGET], rng), Reconnection(limit_s=20.0), clock=clock, rng=rng)
    start = start or api.GenerateRequest(model="demo", prompt="x", idempotency_key="key")
    return GrpcStreamState(start, retry, deadline_s=deadline_s, settle_s=5.0, clock=clock), clock


def opening(seed: int = 42) -> api.GenerateResponse:
    return api.GenerateResponse(chunk=api.TokenChunk(request_id=ID), seed=seed)


def tokens(next_index: int, ids: Sequence[int], **fields: object) -> api.GenerateResponse:
    chunk = api.TokenChunk(request_id=ID, next_index=next_index, digest=f"d{next_index}", token_ids=ids, text="t")
    chunk.MergeFrom(api.TokenChunk(**fields))  # type: ignore[arg-type]
    return api.GenerateResponse(chunk=chunk)


def end(next_index: int, **fields: object) -> api.GenerateResponse:
    return tokens(next_index, [], usage=api.Usage(prompt_tokens=1, completion_tokens=2), **fields)


def fail_for_ever(stream: GrpcStreamState, clock: Clock, failure: Failure = AWAY) -> None:
    for _ in range(1_000):
        stream.next_call()
        clock.now += stream.failed(failure, TARGET)


def test_generate_until_the_id_is_known_then_resume_with_all_that_was_asked() -> None:
    stream, _ = stream_state()
    first = stream.next_call().request
    assert isinstance(first, api.GenerateRequest)
    stream.failed(AWAY, TARGET)
    assert stream.next_call().request == first, "the retry must join the first try"
    assert stream.read_message(opening(), TARGET) is None
    assert (stream.is_accepted, stream.position) == (True, Position(ID))
    chunk = stream.read_message(tokens(2, [5, 6]), TARGET)
    assert isinstance(chunk, Chunk)
    assert (chunk.token_ids, chunk.position) == ((5, 6), Position(ID, 2, "d2"))
    stream.failed(AWAY, TARGET)
    again = stream.next_call().request
    assert isinstance(again, api.ResumeRequest)
    assert (again.request_id, again.next_index, again.digest) == (ID, 2, "d2")
    expected = api.GenerateRequest()
    expected.CopyFrom(first)
    expected.sampling.seed = 42
    assert again.request == expected
    assert not first.sampling.HasField("seed"), "the caller's message was changed"


def test_a_caller_who_resumes_has_nothing_to_ask_again() -> None:
    stream, _ = stream_state(Position(ID, 3, "d3"))
    request = stream.next_call().request
    assert isinstance(request, api.ResumeRequest)
    assert (request.next_index, request.digest, request.HasField("request")) == (3, "d3", False)


def test_the_end_ends_it() -> None:
    stream, _ = stream_state()
    for message in (opening(), tokens(2, [5, 6]), tokens(3, [], finish_reason=api.FINISH_REASON_LENGTH)):
        stream.read_message(message, TARGET)
        assert not stream.is_over
    last = stream.read_message(end(4), TARGET)
    assert stream.is_over
    assert last is not None
    assert last.usage is not None
    stream.raise_failure()  # nothing failed


@pytest.mark.parametrize(
    "message",
    [
        tokens(2, [5, 6]),  # again
        tokens(1, [5]),  # of before
        tokens(4, [7]),  # one is missing
        tokens(6, [7, 8], finish_reason=api.FINISH_REASON_STOP, choice=1),
        end(5),
        end(2),
    ],
    ids=["repeated", "older", "gap", "gap before a finish", "gap before the end", "end again"],
)
def test_what_does_not_follow_is_not_believed(message: api.GenerateResponse) -> None:
    stream, _ = stream_state()
    for before in (opening(), tokens(2, [5, 6])):
        stream.read_message(before, TARGET)
    with pytest.raises(DataLoss) as caught:
        stream.read_message(message, TARGET)
    assert caught.value.position == Position(ID, 2, "d2")


def test_another_requests_tokens_are_not_believed() -> None:
    stream, _ = stream_state()
    stream.read_message(opening(), TARGET)
    with pytest.raises(DataLoss, match="went on with other"):
        stream.read_message(tokens(1, [5], request_id="other"), TARGET)


def test_a_call_that_ends_too_early_is_taken_up_again() -> None:
    stream, _ = stream_state()
    stream.read_message(opening(), TARGET)
    stream.next_call()
    stream.ended(TARGET)
    assert not stream.is_over


def test_a_caller_at_the_end_of_a_log_hears_nothing_more() -> None:
    stream, _ = stream_state(Position(ID, 4, "d4"))
    stream.next_call()
    stream.ended(TARGET)
    assert stream.is_over


def test_errors_tell_where_the_stream_stood() -> None:
    stream, clock = stream_state()
    stream.read_message(opening(), TARGET)
    stream.read_message(tokens(2, [5, 6]), TARGET)
    with pytest.raises(Unavailable) as caught:
        fail_for_ever(stream, clock)
    assert caught.value.position == Position(ID, 2, "d2")
    assert clock.now <= 120.0


def test_an_error_before_anything_was_accepted_has_no_position() -> None:
    stream, _ = stream_state()
    with pytest.raises(RequestNotFound) as caught:
        stream.failed(Failure(Code.NOT_FOUND, "none", "REQUEST_NOT_FOUND"), TARGET)
    assert caught.value.position is None


def test_a_model_that_was_there_when_the_request_was_accepted_comes_back() -> None:
    unknown = Failure(Code.NOT_FOUND, "no such model", "MODEL_NOT_FOUND")
    stream, clock = stream_state()
    with pytest.raises(ModelNotFound):
        stream.failed(unknown, TARGET)
    stream.read_message(opening(), TARGET)
    stream.next_call()
    stream.failed(unknown, TARGET)
    with pytest.raises(Unavailable, match="no such model"):
        fail_for_ever(stream, clock, unknown)
    asked, _ = stream_state(Position(ID))
    with pytest.raises(ModelNotFound):
        asked.failed(unknown, TARGET)


def test_a_log_that_is_shorter_than_what_was_read_of_it_has_lost_data() -> None:
    out = Failure(Code.OUT_OF_RANGE, "past the end", "OFFSET_OUT_OF_RANGE")
    stream, _ = stream_state()
    stream.read_message(opening(), TARGET)
    stream.read_message(tokens(2, [5, 6]), TARGET)
    with pytest.raises(DataLoss, match="past the end"):
        stream.failed(out, TARGET)
    asked, _ = stream_state(Position(ID, 9))
    with pytest.raises(OffsetOutOfRange):
        asked.failed(out, TARGET)


@pytest.mark.parametrize(("code", "kind"), [("engine_error", GenerationFailed), ("quarantined", Quarantined)])
def test_a_request_that_failed_shows_its_last_chunk_and_then_raises(code: str, kind: type[GenerationFailed]) -> None:
    stream, _ = stream_state()
    stream.read_message(opening(), TARGET)
    error = api.RequestError(code=code, message="the reason")
    chunk = stream.read_message(end(1, finish_reason=api.FINISH_REASON_ERROR, error=error), TARGET)
    assert chunk is not None
    assert chunk.finish_reason is FinishReason.ERROR
    assert chunk.error is not None
    with pytest.raises(kind, match="the reason") as caught:
        stream.raise_failure()
    assert (type(caught.value), caught.value.code, caught.value.position) == (kind, code, Position(ID, 1, "d1"))


def test_each_call_carries_what_is_left_of_the_deadline() -> None:
    stream, clock = stream_state(deadline_s=10.0)
    assert stream.next_call().timeout_s == 10.0
    clock.now += 4.0
    stream.failed(AWAY, TARGET)
    assert stream.next_call().timeout_s == 6.0


def test_after_the_deadline_the_end_is_asked_for() -> None:
    stream, clock = stream_state(deadline_s=10.0)
    stream.read_message(opening(), TARGET)
    stream.read_message(tokens(2, [5, 6]), TARGET)
    clock.now += 10.5
    assert stream.failed(LATE, TARGET) == 0.0
    call = stream.next_call()
    assert isinstance(call.request, api.ResumeRequest)
    assert call.timeout_s == 4.5
    stream.read_message(tokens(3, [], finish_reason=api.FINISH_REASON_DEADLINE), TARGET)
    stream.read_message(end(4), TARGET)
    assert stream.is_over


def test_a_deadline_without_the_requests_end_is_an_error() -> None:
    stream, clock = stream_state(deadline_s=10.0)
    stream.read_message(opening(), TARGET)
    clock.now += 10.5
    stream.failed(LATE, TARGET)
    clock.now += 4.6
    with pytest.raises(DeadlineExceeded) as caught:
        stream.failed(LATE, TARGET)
    assert caught.value.position == Position(ID)


def test_a_deadline_before_anything_was_accepted_is_an_error_at_once() -> None:
    stream, clock = stream_state(deadline_s=10.0)
    clock.now += 10.0
    with pytest.raises(DeadlineExceeded):
        stream.failed(LATE, TARGET)


def test_a_full_queue_is_not_waited_for_beyond_the_deadline() -> None:
    stream, clock = stream_state(deadline_s=10.0)
    stream.next_call()
    clock.now += 1.0
    assert 5.0 <= stream.failed(full(5.0), TARGET) < 9.0
    with pytest.raises(QueueFull, match="full") as caught:
        stream.failed(full(9.0), TARGET)
    assert caught.value.retry_after_s == 9.0
    assert caught.value.position is None


def test_gateways_that_are_away_are_not_waited_for_beyond_the_deadline() -> None:
    stream, clock = stream_state(deadline_s=10.0)
    with pytest.raises(DeadlineExceeded, match="away"):
        fail_for_ever(stream, clock)
    assert 107.0 < clock.now < 110.0


def test_once_accepted_the_deadline_shortens_no_wait() -> None:
    stream, clock = stream_state(deadline_s=10.0)
    stream.read_message(opening(), TARGET)
    clock.now += 10.0 - 1e-6
    assert stream.failed(AWAY, TARGET) > 1e-6
    assert isinstance(stream.next_call().request, api.ResumeRequest)


@pytest.mark.parametrize("late_s", [0.0, 1.0, 60.0])
def test_nothing_is_asked_for_after_the_deadline(late_s: float) -> None:
    """The pause, or the caller before the first call, took longer than the deadline."""
    stream, clock = stream_state(deadline_s=10.0)
    clock.now += 10.0 + late_s
    with pytest.raises(DeadlineExceeded) as caught:
        stream.next_call()
    assert caught.value.position is None


def test_a_request_that_waits_outlives_gateways_that_stop_one_after_the_other() -> None:
    stream, clock = stream_state()
    stream.read_message(opening(), TARGET)
    stopping = Failure(Code.UNAVAILABLE, "stopping", reason="GATEWAY_STOPPING", retry_after_s=1.0)
    for _ in range(20):
        stream.next_call()
        clock.now += 40.0
        clock.now += stream.failed(stopping, TARGET)
