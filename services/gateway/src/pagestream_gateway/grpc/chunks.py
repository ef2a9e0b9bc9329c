"""Runs as token chunks."""

from pagestream.v1.inference_pb2 import FINISH_REASON_ERROR, TokenChunk

from pagestream_gateway.runs import Run


def to_chunk(request_id: str, run: Run) -> TokenChunk:
    """The chunk of a run. The log's end is the chunk that has the usage."""
    chunk = TokenChunk(
        request_id=request_id,
        next_index=run.next_index,
        digest=run.digest,
        choice=run.choice,
        token_ids=run.token_ids,
        text=run.text,
        logprobs=run.logprobs,
    )
    if run.finish is not None:
        chunk.finish_reason = run.finish.reason
        chunk.stop_reason = run.finish.stop_reason
    if run.end is not None:
        chunk.usage.CopyFrom(run.end.usage)
        if run.end.reason == FINISH_REASON_ERROR:
            chunk.finish_reason = FINISH_REASON_ERROR
            chunk.error.CopyFrom(run.end.error)
    return chunk
