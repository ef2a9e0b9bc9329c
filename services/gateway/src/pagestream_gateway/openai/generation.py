"""What OpenAI's resources share: fields of their bodies, drafts of them, and the handling of a call."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, Literal, TypeVar

from pagestream.v1.inference_pb2 import ON_DISCONNECT_CANCEL, ON_DISCONNECT_CONTINUE, SamplingParams
from pagestream.v1.records_pb2 import AnswerForm, ApiForm
from pydantic import Field, create_model
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.calls import DISCONNECTED, Call, now_s
from pagestream_gateway.error_codes import error_report
from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import (
    Body,
    BodyModel,
    Items,
    Token,
    collecting,
    current_warnings,
    expects,
    parse_json,
    read_body,
)
from pagestream_gateway.http.callers import identify
from pagestream_gateway.models import check_unicode
from pagestream_gateway.openai.writer import AnswerBody, LogWriter, WholeBody
from pagestream_gateway.request import AskedTruncation, Draft, Prompt, TextPrompt, TokenPrompt
from pagestream_gateway.sampling import (
    PARAMETERS,
    UNSUPPORTED_PARAMETERS,
    ResponseFormat,
    constraint_of,
    sampling_from_json,
)
from pagestream_gateway.streams.events import EventStream, Reading, accepts_lines
from pagestream_gateway.streams.whole_answer import WholeAnswer
from pagestream_gateway.text.tokenization import SMALL_BYTES

_MAX_TIMEOUT_S = 7 * 24 * 3600.0

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **UNSUPPORTED_PARAMETERS,
    "return_token_offsets": (False,),
    "return_mm_kwargs": (False,),
    "mm_payload": ("tensors",),
    "routed_experts_prompt_start": (0,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": (),
}
"""Fields of OpenAI's and vLLM's bodies that are not supported, each with the values that ask for nothing.

Client libraries send those values unasked. Any other is refused with the field's name: ignoring it silently would
answer another question than the one that was asked.
"""
OF_CHATS_AND_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
}
"""Likewise, for bodies other than those of completions and chats, which take them."""


SERVED_NAME = "Served name; left out: what `pagestream serve` was started with, or the only model with engines."

Prompts = Annotated[
    str | Items[str] | Items[Token] | Items[Items[Token]],
    expects("must be a string, a list of strings, a list of token ids or a list of lists of token ids"),
]
"""A completion's prompt, an embedding's input."""

NumKeptTokens = Annotated[int, Field(ge=-1, lt=2**31)]
"""Tokens to which a prompt is cut; -1: as many as fit."""

Side = Literal["left", "right"]
"""Where it is cut."""


class PromptedBody(Body):
    """The fields that change no answer, and that all bodies with a prompt take, whatever their API."""

    user: Any = None
    metadata: Any = None
    client_metadata: Any = None
    safety_identifier: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


class QueuedBody(PromptedBody):
    """The fields of all bodies that become requests in a queue. Null is the same as leaving a field out."""

    model: str | None = Field(None, description=SERVED_NAME)
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its special tokens to the prompt."
    )
    priority: int | None = Field(None, description="0 (default) is served first, then 1, then 2.")
    on_disconnect: Literal["cancel", "continue"] | None = Field(
        None,
        description='Without a reader: "cancel" after the disconnect grace (default), or "continue".',
    )
    request_id: str | None = Field(None, description="The caller's own id, kept as metadata.")
    cache_salt: str | None = Field(
        None, min_length=1, description="Only requests with the same salt share computed prefixes."
    )
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = Field(
        None, description='There is one tier: answers say "default".'
    )


def with_sampling_parameters(kind: type[BodyModel]) -> type[BodyModel]:
    """Add a field for each sampling parameter that OpenAI bodies share."""
    return with_parameters()(kind)


def with_parameters(without: Container[str] = ()) -> Callable[[type[BodyModel]], type[BodyModel]]:
    """Return what adds a field for each sampling parameter that OpenAI bodies share, but for those of `without`."""
    return lambda kind: _with_parameters(kind, without)


def _with_parameters(kind: type[BodyModel], without: Container[str]) -> type[BodyModel]:
    fields: dict[str, Any] = {
        parameter.name: (parameter.json_type | None, Field(None, description=parameter.description))
        for parameter in PARAMETERS
        if parameter.json_type is not None and parameter.name not in without
    }
    return create_model(kind.__name__, __base__=kind, __module__=kind.__module__, __doc__=kind.__doc__, **fields)


def prompts_of(given: str | list[str] | list[int] | list[list[int]], add_special_tokens: bool) -> list[Prompt]:
    """Return the prompts of such a field."""
    if isinstance(given, str):
        return [TextPrompt(given, add_special_tokens)]
    if given and isinstance(given[0], int):
        return [TokenPrompt(given)]
    return [
        TextPrompt(item, add_special_tokens) if isinstance(item, str) else TokenPrompt(item)
        for item in given
        if not isinstance(item, int)
    ]


NAMES_BY_FORMAT: Mapping[str, str] = {"structured_outputs": "response_format"}
"""What a body with a `response_format` calls sampling parameters that have another name in it."""


class StreamOptions(Body):
    """OpenAI's and vLLM's stream_options; include_obfuscation changes no token and is ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, Field(description="With include_usage: in each chunk.")] = None
    include_obfuscation: bool | None = None


class GenerationBody(QueuedBody):
    """The fields of both bodies beside the sampling parameters."""

    stream: bool | None = Field(
        None, description="Answer as a stream: server-sent events, or NDJSON where Accept says so."
    )
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = Field(None, description="text, json_object or json_schema.")
    return_token_ids: bool | None = Field(None, description="Show the ids of the prompt's and the output's tokens.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='Log probabilities name tokens "token_id:<id>" in place of their text.'
    )
    truncate_prompt_tokens: NumKeptTokens | None = Field(
        None, description="Most tokens that are kept of each prompt; -1: what leaves one for the output."
    )
    truncation_side: Side | None = Field(
        None, description="Where they are cut off. Default: at the beginning, after the special tokens there."
    )
    # Known fields that can't change the output.
    spaces_between_special_tokens: Any = None
    """Each token's text is what it adds to a text, which has no blanks between special tokens."""
    stream_interval: Any = None
    store: Any = None
    prediction: Any = None
    parallel_tool_calls: Any = None


Parsed = TypeVar("Parsed")
BodyParser = Callable[[dict[str, Any], Headers], Parsed]
Parser = BodyParser[Draft]


def without_unsupported(document: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return a body without the fields of `unsupported`. Raises UnsupportedField where one asks for something."""
    kept = {}
    for name, value in document.items():
        neutral = unsupported.get(name)
        if neutral is None:
            kept[name] = value
        elif value is not None and not any(type(value) is type(nothing) and value == nothing for nothing in neutral):
            raise UnsupportedField(name)
    return kept


def shared_draft(
    body: GenerationBody, headers: Mapping[str, str], document: Mapping[str, Any], api: ApiForm, **own: int | None
) -> dict[str, Any]:
    """Return the arguments of a Draft that both resources fill alike.

    `own` are sampling parameters that the resource has in a form of its own. Raises InvalidRequest.
    """
    shared = {each.name: getattr(body, each.name) for each in PARAMETERS if each.json_type is not None}
    sampling = sampling_from_json(shared | own)
    if body.response_format is not None:
        _set_response_format(sampling, body.response_format)
    options = body.stream_options or StreamOptions()
    return {
        **queued_arguments(body, headers, document, api),
        "sampling": sampling,
        "is_streamed": bool(body.stream),
        "truncation": None
        if body.truncate_prompt_tokens is None
        else AskedTruncation(body.truncate_prompt_tokens, body.truncation_side),
        "answer": AnswerForm(
            api=api,
            created=now_s(),
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
            token_ids=bool(body.return_token_ids),
            tokens_by_id=bool(body.return_tokens_as_token_ids),
            top_logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        ),
    }


def queued_arguments(
    body: QueuedBody, headers: Mapping[str, str], document: Mapping[str, Any], api: ApiForm
) -> dict[str, Any]:
    """Return the arguments of a Draft that all resources fill alike. Raises InvalidRequest."""
    key, timeout = headers.get("idempotency-key", ""), headers.get("x-request-timeout")
    check_unicode(body.request_id or "", "request_id")
    check_unicode(body.cache_salt or "", "cache_salt")
    return {
        "model": body.model or "",
        "on_disconnect": ON_DISCONNECT_CONTINUE if body.on_disconnect == "continue" else ON_DISCONNECT_CANCEL,
        "priority": body.priority or 0,
        "deadline_ms": 0 if timeout is None else _deadline_ms(timeout),
        "client_request_id": body.request_id or headers.get("x-client-request-id") or headers.get("x-request-id", ""),
        "idempotency_key": key,
        "cache_salt": body.cache_salt or "",
        "body_digest": _digest(api, document) if key else "",
    }


def _set_response_format(sampling: SamplingParams, form: ResponseFormat) -> None:
    constraint = constraint_of(form)
    if constraint is None:
        return
    if sampling.HasField("structured_outputs"):
        raise InvalidRequest("response_format", "excludes structured_outputs")
    sampling.structured_outputs.CopyFrom(constraint)


async def generate(
    gateway: Gateway,
    request: Request,
    call: Call,
    parse: Parser,
    *,
    writer: type[LogWriter],
    body: type[AnswerBody] = WholeBody,
    stream: type[EventStream] = EventStream,
    whole: type[WholeAnswer] = WholeAnswer,
) -> Response:
    """Answer a POST whose answer is made of a request's log.

    Ends the call where it is refused before there is an answer; the answer ends its own.
    """
    try:
        identity = await identify(gateway, request)
        call.identified(identity)
        with_ids = switch(request.headers, "X-Stream-Ids")
        with_comments = switch(request.headers, "X-Queue-Comments")
        async with parsed_request(gateway, request, parse) as draft:
            spec = await gateway.submission.submit(draft, identity, call)
        reading = Reading(
            spec,
            identity,
            call,
            writer(spec),
            body,
            with_ids=with_ids,
            as_lines=accepts_lines(request.headers.get("accept")),
            with_queue_comments=with_comments,
        )
        return stream(gateway, reading) if draft.is_streamed else whole(gateway, reading)
    except asyncio.CancelledError:
        call.end(DISCONNECTED)
        raise
    except Exception as error:
        call.end(error_report(error).code)
        raise


@contextmanager
def named_as(field_names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields as a body does, by the names of sampling parameters."""
    try:
        yield
    except InvalidRequest as error:
        if error.field is not None:
            error.field = field_names.get(error.field, error.field)
        raise


@asynccontextmanager
async def parsed_request(gateway: Gateway, request: Request, parse: BodyParser[Parsed]) -> AsyncIterator[Parsed]:
    """Read and parse the body, and hold room for it until the block ends, in which the request is accepted.

    Errors of the draft name its fields as the body does. Raises InvalidRequest, Overloaded.
    """
    max_bytes = gateway.settings.limits.max_body_bytes
    async with gateway.pending.hold(_num_bytes(request, max_bytes)) as pending:
        async with pending.receiving():
            data = await read_body(request, max_bytes)
        parsed = await _parsed(gateway, data, request.headers, parse)
        own_names = parsed.field_names if isinstance(parsed, Draft) else {}
        with named_as({**_names_of_headers(request.headers), **own_names}):
            yield parsed


def _names_of_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return what an HTTP call names the fields of a draft that come from its headers."""
    own = next((name for name in ("X-Client-Request-Id", "X-Request-Id") if name.lower() in headers), "request_id")
    return {"idempotency_key": "Idempotency-Key", "client_request_id": own}


def _num_bytes(request: Request, most: int) -> int:
    """Return how many bytes the body has, before it is read: `most` where the header does not say."""
    announced = request.headers.get("content-length", "")
    return min(int(announced), most) if announced.isdecimal() else most


async def _parsed(gateway: Gateway, data: bytes, headers: Headers, parse: BodyParser[Parsed]) -> Parsed:
    """Parse a body, outside the event loop where it is large."""
    await gateway.turns.take()

    warnings = current_warnings()

    def work() -> Parsed:
        with collecting(warnings):  # also in a thread, which has a context of its own
            return parse(parse_json(data), headers)

    if len(data) <= SMALL_BYTES:
        return work()
    async with gateway.pending.parsing:
        return await gateway.pool.run(work)


def switch(given: Mapping[str, str], name: str) -> bool:
    """Return a header's or a query parameter's value: true, or false where it is not given. Raises InvalidRequest."""
    text = given.get(name, "false")
    if text.lower() not in ("true", "false"):
        raise InvalidRequest(name, f"must be true or false, got {text[:40]!r}")
    return text.lower() == "true"


def _deadline_ms(text: str) -> int:
    try:
        seconds = float(text)
    except ValueError as error:
        raise InvalidRequest("X-Request-Timeout", f"must be a number of seconds, got {text!r}") from error
    if not 0.001 <= seconds <= _MAX_TIMEOUT_S:
        raise InvalidRequest("X-Request-Timeout", f"must be from 0.001 to {_MAX_TIMEOUT_S:g} seconds, got {text}")
    return round(seconds * 1000)


def _digest(api: ApiForm, document: Mapping[str, Any]) -> str:
    """Return a digest that is equal for bodies that say the same, whatever the order of their fields."""
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(f"{api}:{text}".encode()).hexdigest()
