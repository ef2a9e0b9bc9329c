"""POST /v1/embeddings: body, route and answer, and the fields that embeddings, scores and reranks share."""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pagestream.v1.inference_pb2 import SamplingParams, Usage
from pagestream.v1.records_pb2 import API_FORM_EMBEDDINGS, AnswerForm, ApiForm, LogEnd, VectorForm
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.calls import EMBEDDINGS, now_s
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import parse_body
from pagestream_gateway.http.documents import (
    FAILURE_HEADERS,
    GENERATION_ERRORS,
    REQUEST_HEADERS,
    Answers,
    AnswersByPath,
    body_of,
)
from pagestream_gateway.openai import generation
from pagestream_gateway.openai.generation import (
    NumKeptTokens,
    Prompts,
    QueuedBody,
    Side,
    prompts_of,
    queued_arguments,
    without_unsupported,
)
from pagestream_gateway.pooling import numbers_of
from pagestream_gateway.request import AskedPooling, AskedTruncation, Draft, Prompt
from pagestream_gateway.streams.events import LogWriter, Position, Run, position_after

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "padding": ("do_not_pad",),
    "media_io_kwargs": ({},),
    "messages": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (False,),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "activation": (),
    "softmax": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "instruction": (),
}
"""Fields of vLLM's bodies that are not supported, each with the values that ask for nothing."""


class VectorBody(QueuedBody):
    """The fields of all these bodies."""

    truncate_prompt_tokens: NumKeptTokens | None = Field(
        None, description="Most tokens that are kept of each prompt; -1: as many as fit."
    )
    truncation_side: Side | None = Field(
        None, description="Where they are cut off. Default: at the text's end, before the special tokens there."
    )
    use_activation: bool | None = Field(
        None, description="false: the scores of labels or pairs themselves. Default: as the model's files say."
    )


def vector_request(
    body: VectorBody,
    headers: Mapping[str, str],
    document: Mapping[str, Any],
    api: ApiForm,
    *,
    prompts: Sequence[Prompt],
    prompt_field: str,
    form: VectorForm,
    pooling: AskedPooling,
) -> Draft:
    """Return a request for vectors. Raises InvalidRequest."""
    return Draft(
        prompts=prompts,
        prompt_field=prompt_field,
        sampling=SamplingParams(seed=0),
        answer=AnswerForm(api=api, created=now_s(), vectors=form),
        truncation=None
        if body.truncate_prompt_tokens is None
        else AskedTruncation(body.truncate_prompt_tokens, body.truncation_side),
        pooling=pooling,
        **queued_arguments(body, headers, document, api),
    )


_ITEM_BYTES = 128  # of an embedding's object, without its numbers
_JSON_BYTES, _BASE64_BYTES = 12, 6  # of a number


class EmbeddingBody(VectorBody):
    """POST /v1/embeddings."""

    input: Prompts = Field(description="Text, token ids, or a list of either; each has a vector.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description='"float" (default): lists of numbers; "base64": float32 in little-endian order.'
    )
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Leading numbers that are kept, where the model's files say that vectors may be cut."
    )
    normalize: bool | None = Field(None, description="Give vectors length 1. Default: as the model's files say.")
    use_activation: bool | None = Field(None, description="vLLM's name of normalize.")


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the usage object of answers that are made of vectors."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class EmbeddingWriter(LogWriter):
    """Writes vectors; each is an event of a stream."""

    def item(self, run: Run) -> str:
        """Return a vector as OpenAI's object, without its last brace. Nine digits say which float32 it is."""
        if self.spec.answer.vectors.base64:
            shown = f'"{base64.b64encode(run.embedding).decode()}"'
        else:
            shown = f"[{','.join(f'{number:.9g}' for number in numbers_of(run.embedding))}]"
        return f'{{"object":"embedding","index":{run.choice},"embedding":{shown}'

    def chunk(self, run: Run) -> str | None:
        if not run.embedding:
            return None
        position = position_after(run).event_id(self.spec.request_id)
        return f'{self.item(run)},"stream_position":"{position}"}}'

    def usage(self, end: LogEnd, position: Position) -> str | None:
        return json.dumps(
            {**self.whole(end.usage), "data": [], "stream_position": position.event_id(self.spec.request_id)}
        )

    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the members of a whole answer beside its data."""
        return {
            "id": self.spec.request_id,
            "object": "list",
            "created": self.spec.answer.created,
            "model": self.spec.model,
            "usage": usage_of(usage),
        }


class EmbeddingList:
    """The body of a whole answer: OpenAI's list of embeddings."""

    def __init__(self, writer: EmbeddingWriter) -> None:
        self._writer = writer
        self._items = [b""] * writer.num_choices
        self.num_bytes = self.empty_bytes(writer)
        """See AnswerBody."""

    @staticmethod
    def empty_bytes(writer: EmbeddingWriter) -> int:
        """See AnswerBody."""
        return _ITEM_BYTES * writer.num_choices

    @staticmethod
    def size_of(writer: EmbeddingWriter, run: Run) -> int:
        """See AnswerBody."""
        return len(run.embedding) // 4 * (_BASE64_BYTES if writer.spec.answer.vectors.base64 else _JSON_BYTES)

    def set_fingerprint(self, fingerprint: str) -> None:
        """See AnswerBody. Embeddings don't show it, as OpenAI's don't."""

    def add(self, run: Run) -> None:
        """See AnswerBody."""
        if run.embedding:
            item = self._items[run.choice] = f"{self._writer.item(run)}}}".encode()
            self.num_bytes += len(item)

    def serialize(self, end: LogEnd) -> Iterator[bytes]:
        """See AnswerBody."""
        members = json.dumps(self._writer.whole(end.usage), separators=(",", ":"))
        yield members[:-1].encode() + b',"data":['
        self._items.reverse()
        for number in range(len(self._items)):
            yield (b"," if number else b"") + self._items.pop()
        yield b"]}"


def parse(document: dict[str, Any], headers: Mapping[str, str]) -> Draft:
    """Read a body and its headers. Raises InvalidRequest."""
    body = parse_body(EmbeddingBody, without_unsupported(document, UNSUPPORTED))
    normalize = body.use_activation if body.normalize is None else body.normalize
    if body.use_activation not in (None, normalize):
        raise InvalidRequest("use_activation", "is another name of normalize, which has another value")
    return vector_request(
        body,
        headers,
        document,
        API_FORM_EMBEDDINGS,
        prompts=prompts_of(body.input, body.add_special_tokens is not False),
        prompt_field="input",
        form=VectorForm(base64=body.encoding_format == "base64"),
        pooling=AskedPooling(body.dimensions, normalize),
    )


class VectorUsage(BaseModel):
    """Tokens of a request for vectors."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Embedding(BaseModel):
    """The vector of an input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or in base64 float32 in little-endian order.")


class EmbeddingEvent(Embedding):
    """The data of an event of an embedding request that is read on: one vector."""

    stream_position: str


class EmbeddingAnswer(BaseModel):
    """The vectors of a request; as the last event of a stream without them."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: VectorUsage


VECTORS = Answers(errors=GENERATION_ERRORS, headers={200: REQUEST_HEADERS, **FAILURE_HEADERS})
"""Of bodies that ask for vectors, labels or scores."""
ANSWERS: AnswersByPath = {
    ("post", "/v1/embeddings"): VECTORS._replace(
        whole=EmbeddingAnswer, examples={"Two texts": {"input": ["The lighthouse", "The bakery"]}}
    ),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's route."""
    routes = APIRouter(tags=["vectors"])

    @routes.post("/v1/embeddings", openapi_extra=body_of(EmbeddingBody), summary="Make vectors of texts")
    async def embeddings(request: Request) -> Response:
        call = gateway.calls.begin("embeddings", EMBEDDINGS, request.headers)
        return await generation.generate(gateway, request, call, parse, writer=EmbeddingWriter, body=EmbeddingList)

    return routes
