"""Messages of pagestream.v1: a request's message to a draft, and its log to the messages of its answer."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Literal

import grpc
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.inference_pb2 import (
    TRUNCATION_SIDE_LEFT,
    TRUNCATION_SIDE_RIGHT,
    TRUNCATION_SIDE_UNSPECIFIED,
    ChatInput,
    GenerateRequest,
    OnDisconnect,
    SamplingParams,
    Usage,
)
from pagestream.v1.records_pb2 import (
    API_FORM_EMBEDDINGS,
    API_FORM_GRPC,
    API_FORM_SCORE,
    AnswerForm,
    ApiForm,
    LogEntry,
    RequestSpec,
    VectorForm,
)

from pagestream_gateway.calls import Call, now_s
from pagestream_gateway.errors import AnswerTooLarge, GenerationFailed, InvalidRequest, Overloaded
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.openai.scoring import Similarities
from pagestream_gateway.pooling import numbers_of
from pagestream_gateway.request import AskedPooling, AskedTruncation, ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from pagestream_gateway.sampling import PARAMETER_NAMES
from pagestream_gateway.streams.events import Run, failure, fields_at_fault, is_failed, split_runs

_SIDES: Mapping[int, Literal["left", "right"] | None] = {
    TRUNCATION_SIDE_UNSPECIFIED: None,
    TRUNCATION_SIDE_LEFT: "left",
    TRUNCATION_SIDE_RIGHT: "right",
}
_ROLES = ("system", "developer", "user", "assistant", "tool")


def generate_draft(request: GenerateRequest, *, deadline_ms: int) -> Draft:
    """Return the draft of a request. Raises InvalidRequest with field names as in the message."""
    if request.on_disconnect not in OnDisconnect.values():
        raise InvalidRequest("on_disconnect", f"{request.on_disconnect} is no value of OnDisconnect")
    prompt_field, prompt = _prompt(request)
    key = request.idempotency_key
    return Draft(
        model=request.model,
        prompts=[prompt],
        prompt_field=prompt_field,
        sampling=request.sampling,
        answer=_answer_form(request),
        truncation=_truncation(request),
        on_disconnect=request.on_disconnect,
        priority=request.priority,
        deadline_ms=deadline_ms,
        client_request_id=request.client_request_id,
        idempotency_key=key,
        cache_salt=request.cache_salt,
        body_digest=hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest() if key else "",
    )


def _answer_form(request: GenerateRequest) -> AnswerForm:
    """Return the form in which HTTP shows the answer."""
    form = AnswerForm(api=API_FORM_GRPC, created=now_s(), include_usage=True)
    if request.sampling.HasField("prompt_logprobs"):
        form.prompt_logprobs = request.sampling.prompt_logprobs
    return form


def _truncation(request: GenerateRequest) -> AskedTruncation | None:
    if request.truncation_side not in _SIDES:
        raise InvalidRequest("truncation_side", f"{request.truncation_side} is no value of TruncationSide")
    if not request.HasField("truncate_prompt_tokens"):
        return None
    return AskedTruncation(request.truncate_prompt_tokens, _SIDES[request.truncation_side])


def with_message_path(error: InvalidRequest) -> InvalidRequest:
    """Set the error's field to its path in GenerateRequest."""
    if error.field in PARAMETER_NAMES:
        error.field = f"sampling.{error.field}"
    elif error.field in ("messages", "continue_final_message"):
        error.field = f"chat.{error.field}"
    return error


def _prompt(request: GenerateRequest) -> tuple[str, Prompt]:
    which = request.WhichOneof("input")
    if which == "prompt":
        return "prompt", TextPrompt(request.prompt)
    if which == "prompt_token_ids":
        return "prompt_token_ids", TokenPrompt(request.prompt_token_ids.ids)
    if which == "chat":
        return "chat.messages", _chat(request.chat)
    raise InvalidRequest("input", "one of prompt, prompt_token_ids and chat must be given")


def _chat(chat: ChatInput) -> ChatPrompt:
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(chat.messages):
        if message.role not in _ROLES:
            raise InvalidRequest(
                f"chat.messages.{number}.role", f"expected one of {', '.join(_ROLES)}, got {message.role[:40]!r}"
            )
        named = {"name": message.name} if message.name else {}
        messages.append({"role": message.role, "content": message.content, **named})
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    return ChatPrompt(messages, add_generation_prompt=opens, continue_final_message=chat.continue_final_message)


Context = grpc.aio.ServicerContext[bytes, bytes]


class ChunkStream:
    """Writes a request's log from an index.

    A message of live entries is handed to gRPC as they come. Its completion, which means that the client's window had
    room, is not waited for but looked at when the next entries come: where it is not there yet, they wait in the
    read's buffer, and the call's task waits for both.
    """

    def __init__(
        self,
        gateway: Gateway,
        context: Context,
        spec: RequestSpec,
        call: Call,
        *,
        next_index: int,
        message: type[api.GenerateResponse] | type[api.ResumeResponse],
    ) -> None:
        """`next_index`: of the first entry to write."""
        self._gateway = gateway
        self._spec = spec
        self._call = call
        self._next_index = next_index
        self._message = message
        self._writes = OverlappedWrites(context)

    async def write(self, digest: str) -> None:
        """Write up to the end of the log; `digest` is that of the log before the first entry, "" for unknown."""
        follow = self._gateway.requests.follow
        with self._gateway.streams.entered():
            try:
                async with aclosing(
                    follow(self._spec, from_index=self._next_index, digest=digest, sink=self._pass_on)
                ) as batches:
                    async for batch in batches:
                        for run in self._counted(split_runs(self._next_index, batch)):
                            await self._writes.write(self._response(run))
                await self._writes.flush()
            finally:
                self._writes.close()

    def _pass_on(self, entries: Sequence[LogEntry], token: LogEntry | None) -> bool:
        """Write live entries at once, where gRPC has taken those before; see Sink."""
        if not self._writes.is_ready:
            return False
        runs = split_runs(self._next_index, entries if token is None else (token,))
        if len(runs) != 1:
            return False
        self._writes.start_write(self._response(*self._counted(runs)))
        return True

    def _counted(self, runs: list[Run]) -> list[Run]:
        """Count runs that are about to be written, and return them."""
        self._next_index = runs[-1].next_index
        self._call.tokens(sum(len(run.token_ids) for run in runs))
        return runs

    def _response(self, run: Run) -> Any:
        response = self._message()
        _fill_chunk(response.chunk, self._spec.request_id, run)
        return response


class OverlappedWrites:
    """Writes messages to a call, one at a time; the last one's completion may be outstanding.

    A write of grpc.aio is a coroutine that starts an operation and waits for its future. `start_write` runs it up to
    there, as a task would, and the next write, or `close`, the rest.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._write: Coroutine[Any, Any, None] | None = None
        self._future: asyncio.Future[Any] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the last message has been taken, so that `start_write` may be called."""
        return self._future is None or self._future.done()

    def start_write(self, message: Any) -> None:
        """Begin to write a message; only where `is_ready`. Raises what the write before has failed with."""
        self._complete_write()
        write = self._context.write(message)
        try:
            future = write.send(None)
        except StopIteration:
            return
        future._asyncio_future_blocking = False  # as a task does that will await it
        self._write, self._future = write, future

    async def write(self, message: Any) -> None:
        """Write a message, after those before."""
        await self.flush()
        await self._context.write(message)

    async def flush(self) -> None:
        """Wait until the last message has been taken."""
        if self._future is not None:
            await asyncio.wait((self._future,))
            self._complete_write()

    def close(self) -> None:
        """Give up what is outstanding."""
        write, future = self._write, self._future
        self._write = self._future = None
        if future is not None and not future.cancel() and not future.cancelled():
            future.exception()  # of a call that has ended
        if write is not None:
            write.close()

    def _complete_write(self) -> None:
        """Run the rest of the last write, whose future is done."""
        write, self._write, self._future = self._write, None, None
        if write is not None:
            try:
                write.send(None)
            except StopIteration:
                return
            raise RuntimeError("grpc.aio waits twice in a write")


def _fill_chunk(chunk: api.TokenChunk, request_id: str, run: Run) -> None:
    """Write a run into an empty chunk; the chunk of the log's end is the one with the usage.

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
    if run.prompt_end:
        chunk.prompt_logprobs.extend(run.prompt_logprobs)
        chunk.embedding = run.embedding
    if run.finish is not None:
        chunk.finish_reason = run.finish.reason
        chunk.stop_reason = run.finish.stop_reason
    if run.end is not None:
        chunk.usage.CopyFrom(run.end.usage)
        if run.end.reason == api.FINISH_REASON_ERROR:
            chunk.finish_reason = api.FINISH_REASON_ERROR
        if run.end.HasField("error"):
            chunk.error.CopyFrom(run.end.error)
            if names := fields_at_fault(run.end.error):
                chunk.error.field = f"sampling.{names[0]}"


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

    def add_numbers(run: Run) -> None:
        if run.embedding:
            response.embeddings[run.choice].values.extend(numbers_of(run.embedding))

    with _held(gateway, spec):
        response.usage.CopyFrom(await _follow(gateway, spec, add_numbers))
    return response


async def score_response(gateway: Gateway, spec: RequestSpec) -> api.ScoreResponse:
    """Follow a log to its end, and return its scores."""
    similarities = Similarities(spec)
    with _held(gateway, spec):
        usage = await _follow(gateway, spec, similarities.add)
    return api.ScoreResponse(request_id=spec.request_id, scores=similarities.scores, usage=usage)


async def _follow(gateway: Gateway, spec: RequestSpec, add: Callable[[Run], object]) -> Usage:
    with gateway.streams.entered():
        async with aclosing(gateway.requests.follow(spec)) as batches:
            async for batch in batches:
                for run in split_runs(0, batch):
                    if run.end is None:
                        add(run)
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
    if not gateway.answer_budget.try_acquire(num_bytes):
        message = "other answers have used this gateway's memory; call again with the same key, or Resume"
        raise Overloaded(message, _RETRY_AFTER_S)
    try:
        yield
    finally:
        gateway.answer_budget.release(num_bytes)
