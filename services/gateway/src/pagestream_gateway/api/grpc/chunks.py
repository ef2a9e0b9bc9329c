"""Runs as token chunks."""

from pagestream.v1.inference_pb2 import FINISH_REASON_ERROR, TokenChunk

from pagestream_gateway.core.runs import Run


def fill_chunk(chunk: TokenChunk, request_id: str, run: Run) -> None:
    """Makes an empty chunk that of a run. The log's end is the chunk that has the usage.

    In place: a message that is given to another one's constructor is copied, for each token of each stream.
    """
    chunk.request_id = request_id
    chunk.next_index = run.next_index
    chunk.digest = run.digest
    chunk.choice = run.choice
    chunk.token_ids.extend(run.token_ids)
    chunk.text = run.text
    if run.logprobs:
        chunk.logprobs.extend(run.logprobs)
    if run.finish is not None:
        chunk.finish_reason = run.finish.reason
        chunk.stop_reason = run.finish.stop_reason
    if run.end is not None:
        chunk.usage.CopyFrom(run.end.usage)
        if run.end.reason == FINISH_REASON_ERROR:
            chunk.finish_reason = FINISH_REASON_ERROR
            chunk.error.CopyFrom(run.end.error)
