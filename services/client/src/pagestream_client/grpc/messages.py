"""From the answers of the wire contract to the client's types."""

from __future__ import annotations

from pagestream.v1 import inference_pb2 as api

from pagestream_client.chunks import Chunk, FinishReason, Logprob, RequestError, Usage
from pagestream_client.views import Embeddings, ModelInfo, RequestInfo, RequestState, Scores

_REASONS: dict[int, FinishReason] = {
    value: FinishReason(name.removeprefix("FINISH_REASON_").lower())
    for name, value in api.FinishReason.items()
    if value
}


def finish_reason_from_proto(reason: int) -> FinishReason | None:
    """Return the reason of a proto enum value: None for UNSPECIFIED, ERROR for a value that this client lacks."""
    return _REASONS.get(reason, FinishReason.ERROR) if reason else None


def usage_of(usage: api.Usage) -> Usage:
    """Return the message as a dataclass."""
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def chunk_of(chunk: api.TokenChunk) -> Chunk:
    """Return the message as a dataclass."""
    return Chunk(
        request_id=chunk.request_id,
        next_index=chunk.next_index,
        digest=chunk.digest,
        choice=chunk.choice,
        token_ids=tuple(chunk.token_ids),
        text=chunk.text,
        logprobs=tuple(_logprobs_of(each) for each in chunk.logprobs),
        finish_reason=finish_reason_from_proto(chunk.finish_reason),
        stop_reason=chunk.stop_reason,
        usage=usage_of(chunk.usage) if chunk.HasField("usage") else None,
        error=RequestError(chunk.error.code, chunk.error.message) if chunk.HasField("error") else None,
    )


def _logprobs_of(position: api.TokenLogprobs) -> tuple[Logprob, ...]:
    return tuple(Logprob(each.token_id, each.logprob, each.rank, each.text) for each in position.entries)


_STATES = {
    api.REQUEST_STATE_QUEUED: RequestState.QUEUED,
    api.REQUEST_STATE_RUNNING: RequestState.RUNNING,
    api.REQUEST_STATE_FINISHED: RequestState.FINISHED,
}


def request_info_of(answer: api.GetRequestResponse) -> RequestInfo:
    """Return the message as a dataclass."""
    return RequestInfo(
        request_id=answer.request_id,
        model=answer.model,
        state=_STATES.get(answer.state, RequestState.QUEUED),
        queue_position=answer.queue_position if answer.HasField("queue_position") else None,
        expected_wait_ms=answer.expected_wait_ms if answer.HasField("expected_wait_ms") else None,
        finish_reason=finish_reason_from_proto(answer.finish_reason),
        next_index=answer.next_index,
        usage=usage_of(answer.usage),
        attempts=answer.attempts,
    )


def model_info_of(model: api.Model) -> ModelInfo:
    """Return the message as a dataclass."""
    return ModelInfo(model.name, model.max_model_len, model.created, model.engines)


def embeddings_of(answer: api.EmbedResponse) -> Embeddings:
    """Return the message as a dataclass."""
    return Embeddings(answer.request_id, [tuple(each.values) for each in answer.embeddings], usage_of(answer.usage))


def scores_of(answer: api.ScoreResponse) -> Scores:
    """Return the message as a dataclass."""
    return Scores(answer.request_id, tuple(answer.scores), usage_of(answer.usage))
