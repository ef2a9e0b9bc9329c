"""The OpenAPI document, made of what each resource says of its answers, and the page that shows it."""

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from threading import Lock
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from pagestream_gateway.error_codes import HEADERS as LIMIT_HEADERS
from pagestream_gateway.http import viewer
from pagestream_gateway.openai.errors import ErrorAnswer, ErrorEvent
from pagestream_gateway.streams.events import NDJSON, SSE, DoneLine, QueueLine

MODEL = "my-model"
MESSAGES = [{"role": "user", "content": "Who lives in the lighthouse?"}]
TOOL_NAME = "get_weather"
TOOL_ABOUT = "The weather of a place."
TOOL_SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FORM_NAME = "inhabitant"
FORM_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "at_home": {"type": "boolean"}},
    "required": ["name", "at_home"],
    "additionalProperties": False,
}
CHAT_EXAMPLE = {"messages": MESSAGES, "max_tokens": 64}

ADMIN_PREFIX = "/admin/v1"

Examples = Mapping[str, dict[str, Any]]
"""Bodies by what they show."""
AnswersByPath = Mapping[tuple[str, str], "Answers"]
"""The answers of operations, by method and path."""

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


def install(
    app: FastAPI, answers: AnswersByPath, bodies: Sequence[type[BaseModel]], *, asks_for_credentials: bool
) -> None:
    """Add /openapi.json, with the schemas of `answers` and `bodies`, and /docs. Call it after all routes are there.

    The document takes some 0.3 s of processor time: it is made when it is first asked for, beside the event loop.
    """
    made: dict[str, bytes] = {}
    making = Lock()

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> Response:
        with making:
            if "document" not in made:
                made["document"] = json.dumps(_document(app, answers, bodies), ensure_ascii=False).encode()
        return Response(made["document"], media_type="application/json")

    app.include_router(viewer.router(asks_for_credentials=asks_for_credentials))


class Answers(NamedTuple):
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
    has_lines: bool = True
    """Whether a stream may be NDJSON."""
    examples: Examples = MappingProxyType({})
    """Of the JSON body, where there is one."""


_ALWAYS = (400, 403, 408, 431, 500, 503)
"""Errors of every operation: what comes is no request or one for another host, a defect, the end of the process."""
_RETRY = ("Retry-After", "retry-after-ms")
_NEVER = ("x-should-retry",)
_RETRIED = {409: _NEVER, 429: (*_RETRY, *_NEVER, *LIMIT_HEADERS), 500: _NEVER, 503: _RETRY}
REQUEST_HEADERS = ("X-Request-Id", "X-Request-Seed", "X-Client-Request-Id")
READ_HEADERS = {200: REQUEST_HEADERS}
QUEUE_HEADERS = ("X-Queue-Position", "X-Expected-Wait-Ms")
GENERATION_ERRORS = (401, 404, 409, 413, 415, 429)
CHANGE_ERRORS = (401, 404, 413, 415)
# By status: of an operation that reads a request, of one that failed after its acceptance, of one that generates;
# and the last two in Anthropic's API, where an answer also has "request-id".
FAILURE_HEADERS = dict.fromkeys((400, 409, 429, 500, 503), REQUEST_HEADERS)
GENERATION_HEADERS = {200: (*REQUEST_HEADERS, *QUEUE_HEADERS, *LIMIT_HEADERS), **FAILURE_HEADERS}
_DONE = "[DONE]"
_LINES = (QueueLine, DoneLine)
ANTHROPIC_HEADERS = {status: (*names, "request-id") for status, names in GENERATION_HEADERS.items()}
ANTHROPIC_FAILURE_HEADERS = {status: (*names, "request-id") for status, names in FAILURE_HEADERS.items()}


def at(paths: Sequence[str], answers: Answers) -> dict[tuple[str, str], Answers]:
    """Return the answers of a POST that has several paths."""
    return {("post", path): answers for path in paths}


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
    "x-should-retry": ("boolean", "false where no retry helps."),
    **dict.fromkeys(LIMIT_HEADERS, ("string", "How far a limit of the caller is used; only where it has one.")),
}
"""Type and meaning by name."""


def _document(app: FastAPI, known: AnswersByPath, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    shown: dict[str, type[BaseModel]] = {}
    for answers in known.values():
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
            answers = known[method, path]
            operation["responses"] = _responses(answers)
            if json_body := operation.get("requestBody", {}).get("content", {}).get(_JSON):
                json_body["examples"] = {
                    summary: {"summary": summary, "value": body} for summary, body in answers.examples.items()
                }
            if path.startswith(ADMIN_PREFIX):
                operation["security"] = [{"adminKey": []}]
    return document


def _responses(answers: Answers) -> dict[str, Any]:
    unfinished = () if answers.unfinished is None else (202,)
    statuses = {200, *unfinished, *_ALWAYS, *answers.errors, *answers.texts}
    return {str(status): _response(answers, status) for status in sorted(statuses)}


def _response(answers: Answers, status: int) -> dict[str, Any]:
    whole = _bodies(answers, status)
    content = {_JSON: {"schema": _any_of(whole)}} if whole else {}
    if status == HTTPStatus.OK and answers.events:
        content[SSE] = {"schema": _event(answers.events)}
        if answers.has_lines:
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
    if ErrorEvent in models:  # OpenAI's forms
        data = {"anyOf": [data, {"const": _DONE, "description": "The last event."}]}
    text = {"type": "string"}
    return {"type": "object", "required": ["data"], "properties": {"data": data, "id": text, "event": text}}


def _bodies(answers: Answers, status: int) -> Sequence[type[BaseModel]]:
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
