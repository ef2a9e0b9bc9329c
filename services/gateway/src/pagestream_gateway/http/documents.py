"""The OpenAPI document, its examples, and the page that shows it."""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from threading import Lock
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from pagestream_gateway.admin import schemas as admin
from pagestream_gateway.admin.routing import PREFIX as ADMIN
from pagestream_gateway.error_codes import HEADERS as LIMIT_HEADERS
from pagestream_gateway.http import viewer
from pagestream_gateway.http.schemas import generation, resources, vectors
from pagestream_gateway.http.schemas.errors import ErrorAnswer, ErrorEvent, MessageError
from pagestream_gateway.streams.events import NDJSON, SSE

MODEL = "my-model"
_MESSAGES = [{"role": "user", "content": "Who lives in the lighthouse?"}]
_TOOL_NAME = "get_weather"
_TOOL_ABOUT = "The weather of a place."
_TOOL_SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
_FORM_NAME = "inhabitant"
_FORM_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "at_home": {"type": "boolean"}},
    "required": ["name", "at_home"],
    "additionalProperties": False,
}
_LABELLED = {"input": ["The harbour is lovely."]}
_SCORED = {"text_1": "Where does the baker work?", "text_2": ["In the bakery.", "At sea."]}
_RANKED = {"query": "Where does the baker work?", "documents": ["In the bakery.", "At sea."], "top_n": 1}
_CHAT = {"messages": _MESSAGES, "max_tokens": 64}
_RESPONSE_BODY = {"model": MODEL, "input": "Who lives in the lighthouse?", "max_output_tokens": 64}

Examples = Mapping[str, dict[str, Any]]
"""Bodies by what they show."""

_BODIES: Mapping[str, Examples] = {
    "/v1/chat/completions": {
        "A question": _CHAT,
        "A stream": {**_CHAT, "stream": True, "stream_options": {"include_usage": True}},
        "An answer by a JSON schema": {
            **_CHAT,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": _FORM_NAME, "strict": True, "schema": _FORM_SCHEMA},
            },
        },
        "A tool": {
            **_CHAT,
            "tools": [
                {
                    "type": "function",
                    "function": {"name": _TOOL_NAME, "description": _TOOL_ABOUT, "parameters": _TOOL_SCHEMA},
                }
            ],
            "tool_choice": "auto",
        },
    },
    "/v1/completions": {
        "A beginning": {"prompt": "Once upon a time", "max_tokens": 64},
        "A stream with log probabilities": {
            "prompt": "Once upon a time",
            "max_tokens": 16,
            "logprobs": 2,
            "stream": True,
        },
    },
    "/v1/responses": {
        "A question": _RESPONSE_BODY,
        "A stream": {**_RESPONSE_BODY, "stream": True},
        "An answer by a JSON schema": {
            **_RESPONSE_BODY,
            "text": {"format": {"type": "json_schema", "name": _FORM_NAME, "schema": _FORM_SCHEMA, "strict": True}},
        },
    },
    "/v1/messages": {
        "A question": _CHAT,
        "A stream": {**_CHAT, "stream": True},
        "A tool": {
            **_CHAT,
            "tools": [{"name": _TOOL_NAME, "description": _TOOL_ABOUT, "input_schema": _TOOL_SCHEMA}],
        },
    },
    "/v1/messages/count_tokens": {"A question": {"messages": _MESSAGES}},
    "/v1/embeddings": {"Two texts": {"input": ["The lighthouse", "The bakery"]}},
    **{key: {"A text": _LABELLED} for key in ("/v1/classify", "/classify")},
    **{key: {"A text and two others": _SCORED} for key in ("/v1/score", "/score")},
    **{key: {"The best of two": _RANKED} for key in ("/v1/rerank", "/v2/rerank", "/rerank")},
    "/v1/batches": {
        "Two jobs": {
            "endpoint": "/v1/chat/completions",
            "requests": [{"custom_id": each, "body": _CHAT} for each in ("first", "second")],
        },
        "The jobs of a file": {"endpoint": "/v1/chat/completions", "input_file_id": "file-0123456789abcdef"},
    },
    "/tokenize": {"A text": {"prompt": "Once upon a time"}, "A conversation": {"messages": _MESSAGES}},
    "/detokenize": {"Three tokens": {"tokens": [1, 2, 3]}},
    "/v1/requests/{request_id}": {"The chat that it was": {**_CHAT, "seed": 0}},
    "/v1/load_lora_adapter": {"A folder": {"lora_name": "my-adapter", "lora_path": "/adapters/my-adapter"}},
    "/v1/unload_lora_adapter": {"By name": {"lora_name": "my-adapter"}},
    **{key: {"By name": {"model": MODEL}} for key in ("/v1/models/load", "/v1/models/unload")},
}
"""By path, for the operation there that has a JSON body."""


def examples_of(path: str) -> dict[str, Any]:
    """Return the examples of the body of `path` in OpenAPI's form."""
    return {summary: {"summary": summary, "value": body} for summary, body in _BODIES[path].items()}


_STREAM_SWITCHES = {
    "X-Stream-Ids": "Give each event its position as its `id`, too.",
    "X-Queue-Comments": "Say where the request stands as comments of the stream, until its first token.",
}
_JSON = "application/json"
_SCHEMA_PATH = "#/components/schemas/{model}"


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """Return the part of an operation that documents its body, which is any of `models`.

    The framework does not read the body itself, since it has no bounds for it.
    """
    return {"requestBody": {"required": True, "content": {_JSON: {"schema": _any_of(models)}}}}


def stream_body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """Return the same for an operation that may stream its answer, with the headers that change the stream."""
    parameters = [
        {"name": name, "in": "header", "schema": {"type": "boolean", "default": False}, "description": text}
        for name, text in _STREAM_SWITCHES.items()
    ]
    return {**body_of(*models), "parameters": parameters}


def install(app: FastAPI, bodies: Sequence[type[BaseModel]], *, asks_for_credentials: bool) -> None:
    """Add /openapi.json, with the schemas of `bodies`, and /docs. Call it after all routes are there.

    The document takes some 0.3 s of processor time: it is made when it is first asked for, beside the event loop.
    """
    made: dict[str, bytes] = {}
    making = Lock()

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> Response:
        with making:
            if "document" not in made:
                made["document"] = json.dumps(_document(app, bodies), ensure_ascii=False).encode()
        return Response(made["document"], media_type="application/json")

    app.include_router(viewer.router(asks_for_credentials=asks_for_credentials))


class _Answers(NamedTuple):
    """The answers of an operation, beside those that every operation may give."""

    whole: type[BaseModel] | None = None
    """The JSON of 200."""
    events: Sequence[type[BaseModel]] = ()
    """The data of an event, which is one of these, where 200 may be a stream."""
    texts: Sequence[int] = ()
    """Statuses of answers in plain text."""
    errors: Sequence[int] = ()
    """Statuses of answers with an error."""
    headers: Mapping[int, Sequence[str]] = {}
    """Headers by status, of those in _HEADERS."""
    refusals: Sequence[type[BaseModel]] = (ErrorAnswer,)
    """The JSON of an error, which is one of these."""
    one_of: Sequence[type[BaseModel]] = ()
    """The JSON of 200, which is one of these, in place of `whole`."""
    unfinished: type[BaseModel] | None = None
    """The JSON of 202."""
    lines: Sequence[int] = ()
    """Statuses of answers that are files: a JSON document in each line."""


_ALWAYS = (400, 403, 408, 431, 500, 503)
"""Errors of every operation: what comes is no request or one for another host, a defect, the end of the process."""
_RETRY = ("Retry-After", "retry-after-ms")
_RETRIED = {429: (*_RETRY, "x-should-retry", *LIMIT_HEADERS), 503: _RETRY}
_OWN = ("X-Request-Id", "X-Request-Seed", "X-Client-Request-Id")
_OWNED = {200: _OWN}
_QUEUED = ("X-Queue-Position", "X-Expected-Wait-Ms")
_GENERATION_ERRORS = (401, 404, 409, 413, 415, 429)
_CHANGE_ERRORS = (401, 404, 413, 415)
_FAILED = dict.fromkeys((400, 409, 429, 500, 503), _OWN)  # of what failed after its acceptance
_GENERATED = {200: (*_OWN, *_QUEUED, *LIMIT_HEADERS), **_FAILED}
_REQUEST = "/v1/requests/{request_id}"
_EVENT_ERROR = ErrorEvent
_DONE = "[DONE]"
_LINES = (generation.QueueLine, generation.DoneLine)
_EMPTY = _Answers()
_TEXT = _Answers(texts=(200,))
_REQUEST_READ = _Answers(resources.RequestAnswer, errors=(401, 404), headers=_OWNED)
_MESSAGE_REFUSALS = (MessageError, ErrorAnswer)
"""Refusals of the protocol, which come before a path is looked at, are OpenAI's also for messages."""
_NAMED = {status: (*names, "request-id") for status, names in _GENERATED.items()}
_NAMED_FAILED = {status: (*names, "request-id") for status, names in _FAILED.items()}
_WHOLE_ANSWERS = (
    generation.CompletionAnswer,
    generation.ChatAnswer,
    generation.ResponseAnswer,
    generation.MessageAnswer,
    vectors.EmbeddingAnswer,
    vectors.ScoreAnswer,
    vectors.RerankAnswer,
)
_RESPONSE = "/v1/responses/{response_id}"
_RESPONSE_READ = _Answers(
    generation.ResponseAnswer, errors=(401, 404, 409, 429), headers={200: (*_OWN, *_QUEUED), **_FAILED}
)
_VECTORS = _Answers(errors=_GENERATION_ERRORS, headers={200: _OWN, **_FAILED})


def _at(paths: Sequence[str], answers: _Answers) -> dict[tuple[str, str], _Answers]:
    """Return the answers of a POST that has several paths."""
    return {("post", path): answers for path in paths}


_ANSWERS: Mapping[tuple[str, str], _Answers] = {
    ("post", "/v1/completions"): _Answers(
        generation.CompletionAnswer,
        (generation.CompletionChunk, _EVENT_ERROR),
        errors=_GENERATION_ERRORS,
        headers=_GENERATED,
    ),
    ("post", "/v1/chat/completions"): _Answers(
        generation.ChatAnswer, (generation.ChatChunk, _EVENT_ERROR), errors=_GENERATION_ERRORS, headers=_GENERATED
    ),
    ("post", "/v1/responses"): _Answers(
        generation.ResponseAnswer, (generation.ResponseEvent,), errors=_GENERATION_ERRORS, headers=_GENERATED
    ),
    ("get", _RESPONSE): _RESPONSE_READ._replace(
        events=(generation.ResponseEvent,), headers={200: (*_OWN, *_QUEUED, "X-Stream-Verified"), **_FAILED}
    ),
    ("post", f"{_RESPONSE}/cancel"): _RESPONSE_READ,
    ("delete", _RESPONSE): _Answers(generation.ResponseDeletion, errors=(401, 404)),
    ("get", f"{_RESPONSE}/input_items"): _Answers(generation.ResponseInput, errors=(401, 404)),
    ("post", "/v1/messages"): _Answers(
        generation.MessageAnswer,
        (generation.MessageEvent,),
        errors=_GENERATION_ERRORS,
        headers=_NAMED,
        refusals=_MESSAGE_REFUSALS,
    ),
    ("post", "/v1/messages/count_tokens"): _Answers(
        generation.MessageTokens, errors=(401, 404, 413, 415, 429), refusals=_MESSAGE_REFUSALS
    ),
    ("post", "/v1/embeddings"): _VECTORS._replace(whole=vectors.EmbeddingAnswer),
    **_at(("/v1/classify", "/classify"), _VECTORS._replace(whole=vectors.ClassificationAnswer)),
    **_at(("/v1/score", "/score"), _VECTORS._replace(whole=vectors.ScoreAnswer)),
    **_at(("/v1/rerank", "/v2/rerank", "/rerank"), _VECTORS._replace(whole=vectors.RerankAnswer)),
    ("post", "/v1/files"): _Answers(resources.FileAnswer, errors=(401, 413, 415, 429)),
    ("get", "/v1/files"): _Answers(resources.FileList, errors=(401,)),
    ("get", "/v1/files/{file_id}"): _Answers(resources.FileAnswer, errors=(401, 404)),
    ("get", "/v1/files/{file_id}/content"): _Answers(lines=(200,), errors=(401, 404)),
    ("delete", "/v1/files/{file_id}"): _Answers(resources.FileDeleted, errors=(401, 404, 409)),
    ("post", "/v1/batches"): _Answers(resources.BatchAnswer, errors=(401, 404, 413, 415, 429)),
    ("get", "/v1/batches"): _Answers(resources.BatchList, errors=(401,)),
    ("get", "/v1/batches/{batch_id}"): _Answers(resources.BatchAnswer, errors=(401, 404)),
    ("post", "/v1/batches/{batch_id}/cancel"): _Answers(resources.BatchAnswer, errors=(401, 404, 409)),
    ("post", "/tokenize"): _Answers(resources.TokenizeAnswer, errors=(401, 404, 413, 415, 429)),
    ("post", "/detokenize"): _Answers(resources.DetokenizeAnswer, errors=(401, 404, 413, 415, 429)),
    ("get", "/v1/models"): _Answers(resources.ModelList, errors=(401,)),
    ("get", "/v1/models/{name}"): _Answers(resources.ModelAnswer, errors=(401, 404)),
    ("get", "/v1/requests"): _Answers(resources.RequestList, errors=(401,)),
    ("get", _REQUEST): _REQUEST_READ,
    ("put", _REQUEST): _REQUEST_READ._replace(errors=_GENERATION_ERRORS),
    ("delete", _REQUEST): _REQUEST_READ,
    ("get", f"{_REQUEST}/answer"): _Answers(
        one_of=_WHOLE_ANSWERS,
        unfinished=resources.RequestAnswer,
        errors=(401, 404, 409, 429),
        headers={200: (*_OWN, "request-id"), 202: (*_OWN, "Retry-After"), 404: _OWN, **_NAMED_FAILED},
        refusals=_MESSAGE_REFUSALS,
    ),
    ("get", f"{_REQUEST}/events"): _Answers(
        events=(
            generation.ChatChunk,
            generation.CompletionChunk,
            generation.MessageEvent,
            vectors.EmbeddingEvent,
            vectors.EmbeddingAnswer,
            vectors.ScoreAnswer,
            vectors.RerankAnswer,
            _EVENT_ERROR,
        ),
        errors=(401, 404, 409, 416),
        headers={200: (*_OWN, "request-id", *_QUEUED, "X-Stream-Verified")},
    ),
    ("post", "/v1/load_lora_adapter"): _Answers(texts=(200,), errors=_CHANGE_ERRORS),
    ("post", "/v1/unload_lora_adapter"): _Answers(texts=(200,), errors=_CHANGE_ERRORS),
    ("post", "/v1/models/load"): _Answers(resources.ModelChangeAnswer, errors=_CHANGE_ERRORS),
    ("post", "/v1/models/unload"): _Answers(resources.ModelChangeAnswer, errors=_CHANGE_ERRORS),
    ("post", "/sleep"): _Answers(errors=(400, 401)),
    ("post", "/wake_up"): _Answers(errors=(400, 401)),
    ("get", "/is_sleeping"): _Answers(resources.SleepAnswer, errors=(401,)),
    ("get", f"{ADMIN}/engines"): _Answers(admin.AdminEngines, errors=(401,)),
    ("get", f"{ADMIN}/models"): _Answers(admin.AdminModels, errors=(401,)),
    ("get", f"{ADMIN}/queues"): _Answers(admin.AdminQueues, errors=(401,)),
    ("get", f"{ADMIN}/usage"): _Answers(admin.AdminUsage, errors=(401,)),
    ("get", f"{ADMIN}/tenants/{{tenant}}/requests"): _Answers(resources.RequestList, errors=(401,)),
    ("get", f"{ADMIN}/requests/{{request_id}}"): _Answers(admin.AdminRequest, errors=(401, 404)),
    ("delete", f"{ADMIN}/requests/{{request_id}}"): _Answers(admin.AdminRequest, errors=(401, 404)),
    ("get", f"{ADMIN}/quarantine"): _Answers(admin.AdminQuarantine, errors=(401, 404)),
    ("post", f"{ADMIN}/quarantine/{{request_id}}/release"): _Answers(admin.AdminRelease, errors=(401, 404)),
    ("post", f"{ADMIN}/keys/reload"): _Answers(admin.AdminReloads, errors=(401,)),
    ("get", "/healthz"): _TEXT,
    ("get", "/health"): _EMPTY,
    ("get", "/ping"): _EMPTY,
    ("get", "/version"): _Answers(resources.VersionAnswer),
    ("get", "/load"): _Answers(resources.LoadAnswer),
    ("get", "/readyz"): _Answers(texts=(200, 503)),
    ("get", "/metrics"): _TEXT,
}
"""By method and path."""
_HEADERS = {
    "X-Request-Id": ("string", "The request's id, by which it is read, resumed and cancelled."),
    "request-id": ("string", "The same, for Anthropic's clients."),
    "X-Request-Seed": ("integer", "The request's seed, with which it can be accepted again."),
    "X-Client-Request-Id": ("string", "The caller's own id, where one was given that a header can hold."),
    "X-Queue-Position": ("integer", "Requests before it; only of streams of queued requests."),
    "X-Expected-Wait-Ms": ("integer", "Milliseconds until an engine takes it; absent where that is not known."),
    "X-Stream-Verified": ("boolean", "Whether the position's digest was compared with the log."),
    "Retry-After": ("integer", "Seconds after which a retry may succeed; absent where that is not known."),
    "retry-after-ms": ("integer", "The same in milliseconds."),
    "x-should-retry": ("boolean", "false where no retry helps: the request alone asks for more than a limit."),
    **dict.fromkeys(LIMIT_HEADERS, ("string", "How far a limit of the caller is used; only where it has one.")),
}
"""Type and meaning by name."""


def _document(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    shown: dict[str, type[BaseModel]] = {}
    for answers in _ANSWERS.values():
        kinds = (answers.whole, answers.unfinished, *answers.one_of, *answers.events, *answers.refusals, *_LINES)
        shown |= {kind.__name__: kind for kind in kinds if kind is not None}
    modes: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = []
    modes += [(body, "validation") for body in bodies]
    modes += [(answer, "serialization") for answer in shown.values()]
    _, found = models_json_schema(modes, ref_template=_SCHEMA_PATH)
    components = document.setdefault("components", {})
    components["schemas"] = found.get("$defs", {})
    components["headers"] = {
        name: {"description": text, "schema": {"type": kind}} for name, (kind, text) in _HEADERS.items()
    }
    components["securitySchemes"] = {
        "apiKey": {"type": "http", "scheme": "bearer"},
        "adminKey": {"type": "http", "scheme": "bearer", "description": "An administrator's key."},
        "anthropicKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    document["security"] = [{"apiKey": []}, {"anthropicKey": []}, {}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = _responses(_ANSWERS[method, path])
            if json_body := operation.get("requestBody", {}).get("content", {}).get(_JSON):
                json_body["examples"] = examples_of(path)
            if path.startswith(ADMIN):
                operation["security"] = [{"adminKey": []}]
    return document


def _responses(answers: _Answers) -> dict[str, Any]:
    unfinished = () if answers.unfinished is None else (202,)
    statuses = {200, *unfinished, *_ALWAYS, *answers.errors, *answers.texts}
    return {str(status): _response(answers, status) for status in sorted(statuses)}


def _response(answers: _Answers, status: int) -> dict[str, Any]:
    whole = _bodies(answers, status)
    content = {_JSON: {"schema": _any_of(whole)}} if whole else {}
    if status == HTTPStatus.OK and answers.events:
        content[SSE] = {"schema": _event(answers.events)}
        if generation.ResponseEvent not in answers.events:  # those that name a response's changes
            content[NDJSON] = {"schema": _any_of((*answers.events, *_LINES))}
    if status in answers.texts:
        content["text/plain"] = {"schema": {"type": "string"}}
    if status in answers.lines:
        content["application/jsonl"] = {"schema": {"type": "string"}}
    response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    names = (*answers.headers.get(status, ()), *_RETRIED.get(status, ()))
    if names:
        response["headers"] = {name: {"$ref": f"#/components/headers/{name}"} for name in names}
    return response | ({"content": content} if content else {})


def _event(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Return the schema of one event of a stream, as OpenAPI describes those: its fields, with the data as text."""
    data: dict[str, Any] = {"type": "string", "contentMediaType": _JSON, "contentSchema": _any_of(models)}
    if _EVENT_ERROR in models:  # OpenAI's forms
        data = {"anyOf": [data, {"const": _DONE, "description": "The last event."}]}
    text = {"type": "string"}
    return {"type": "object", "required": ["data"], "properties": {"data": data, "id": text, "event": text}}


def _bodies(answers: _Answers, status: int) -> Sequence[type[BaseModel]]:
    """Return the JSON of an answer with this status, which is one of these."""
    if status == HTTPStatus.ACCEPTED and answers.unfinished is not None:
        return (answers.unfinished,)
    if status != HTTPStatus.OK:
        return answers.refusals
    return answers.one_of if answers.whole is None else (answers.whole,)


def _any_of(models: Sequence[type[BaseModel]]) -> dict[str, Any]:
    references = [_reference(model) for model in models]
    return references[0] if len(references) == 1 else {"anyOf": references}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _SCHEMA_PATH.format(model=model.__name__)}
