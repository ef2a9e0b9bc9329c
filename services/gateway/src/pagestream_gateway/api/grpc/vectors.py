"""Embed and Score: their drafts, and their responses from a request's log."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from pagestream.v1 import inference_pb2 as api
from pagestream.v1.inference_pb2 import OnDisconnect, SamplingParams, Usage
from pagestream.v1.records_pb2 import (
    API_FORM_EMBEDDINGS,
    API_FORM_SCORE,
    AnswerForm,
    ApiForm,
    RequestSpec,
    VectorForm,
)

from pagestream_gateway.api.failures import failure, is_failed
from pagestream_gateway.api.runs import Run, split_runs
from pagestream_gateway.api.similarities import Similarities, numbers_of
from pagestream_gateway.core.drafts import AskedPooling, Draft, Prompt, TextPrompt, TokenPrompt, now_s
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.errors import AnswerTooLarge, GenerationFailed, InvalidRequest, Overloaded

_NUMBER_BYTES = 12  # in the log's entry, in the message, and in its bytes
_RETRY_AFTER_S = 5.0


def embed_draft(request: api.EmbedRequest, *, deadline_ms: int) -> Draft:
    """Return the draft of a request for vectors. Raises InvalidRequest with field names as in the message."""
    if bool(request.texts) == bool(request.token_ids):
        raise InvalidRequest("texts", "texts or token_ids must be given, and not both")
    prompts: list[Prompt] = [TextPrompt(text) for text in request.texts]
    prompts += [TokenPrompt(each.ids) for each in request.token_ids]
    if request.HasField("dimensions") and not 0 < request.dimensions < 2**31:
        raise InvalidRequest("dimensions", f"must be 1 or more, got {request.dimensions}")
    pooling = AskedPooling(
        request.dimensions if request.HasField("dimensions") else None,
        request.normalize if request.HasField("normalize") else None,
    )
    field = "texts" if request.texts else "token_ids"
    return _draft(request, API_FORM_EMBEDDINGS, prompts, field, VectorForm(base64=True), pooling, deadline_ms)


def score_draft(request: api.ScoreRequest, *, deadline_ms: int) -> Draft:
    """Return the draft of a request for scores. Raises InvalidRequest with field names as in the message."""
    if not request.documents:
        raise InvalidRequest("documents", "must not be empty")
    if len(request.queries) not in (1, len(request.documents)):
        raise InvalidRequest(
            "queries", f"must be one or as many as documents, {len(request.documents)}, got {len(request.queries)}"
        )
    prompts = [TextPrompt(text) for text in (*request.queries, *request.documents)]
    pooling = AskedPooling(normalize=True, num_queries=len(request.queries), query_field="queries")
    return _draft(request, API_FORM_SCORE, prompts, "documents", VectorForm(), pooling, deadline_ms)


def _draft(  # noqa: PLR0917
    request: api.EmbedRequest | api.ScoreRequest,
    form: ApiForm,
    prompts: Sequence[Prompt],
    prompt_field: str,
    vectors: VectorForm,
    pooling: AskedPooling,
    deadline_ms: int,
) -> Draft:
    if request.on_disconnect not in OnDisconnect.values():
        raise InvalidRequest("on_disconnect", f"{request.on_disconnect} is no value of OnDisconnect")
    key = request.idempotency_key
    return Draft(
        model=request.model,
        prompts=prompts,
        prompt_field=prompt_field,
        sampling=SamplingParams(seed=0),
        answer=AnswerForm(api=form, created=now_s(), vectors=vectors),
        pooling=pooling,
        on_disconnect=request.on_disconnect,
        priority=request.priority,
        deadline_ms=deadline_ms,
        client_request_id=request.client_request_id,
        idempotency_key=key,
        cache_salt=request.cache_salt,
        body_digest=hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest() if key else "",
    )


async def embed_response(gateway: Gateway, spec: RequestSpec) -> api.EmbedResponse:
    """Follow a log to its end, and return its vectors."""
    response = api.EmbedResponse(request_id=spec.request_id, embeddings=[api.Embedding() for _ in spec.prompts])

    def take(run: Run) -> None:
        if run.embedding:
            response.embeddings[run.choice].values.extend(numbers_of(run.embedding))

    with _held(gateway, spec):
        response.usage.CopyFrom(await _follow(gateway, spec, take))
    return response


async def score_response(gateway: Gateway, spec: RequestSpec) -> api.ScoreResponse:
    """Follow a log to its end, and return its scores."""
    similarities = Similarities(spec)
    with _held(gateway, spec):
        usage = await _follow(gateway, spec, similarities.add)
    return api.ScoreResponse(request_id=spec.request_id, scores=similarities.scores, usage=usage)


async def _follow(gateway: Gateway, spec: RequestSpec, take: Callable[[Run], object]) -> Usage:
    with gateway.streams.entered():
        async with aclosing(gateway.requests.follow(spec)) as batches:
            async for batch in batches:
                for run in split_runs(0, batch):
                    if run.end is None:
                        take(run)
                        continue
                    if is_failed(spec, run.end):
                        raise failure(spec, run.end)
                    return run.end.usage
    raise GenerationFailed("log_without_end", "the log ended without its finish record")


@contextmanager
def _held(gateway: Gateway, spec: RequestSpec) -> Iterator[None]:
    """Hold an answer's bytes of the memory that all share which are not streamed. Raises Overloaded, AnswerTooLarge."""
    num_bytes = _NUMBER_BYTES * len(spec.prompts) * spec.pooling.dimensions
    if num_bytes > gateway.answer_budget.limit_bytes:
        raise AnswerTooLarge(spec.request_id, gateway.answer_budget.limit_bytes)
    if not gateway.answer_budget.try_take(num_bytes):
        message = "other answers have used this gateway's memory; call again with the same key, or Resume"
        raise Overloaded(message, _RETRY_AFTER_S)
    try:
        yield
    finally:
        gateway.answer_budget.give(num_bytes)
