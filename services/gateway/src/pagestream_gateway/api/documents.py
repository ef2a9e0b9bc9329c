"""The OpenAPI document, and a page that shows it without fetching anything from outside."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from importlib import resources
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse, Response

from pagestream_gateway.api import schemas

_SCHEMA_PATH = "#/components/schemas/{model}"


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """Return the part of an operation that documents its body, which is any of `models`.

    The framework does not read the body itself, since it has no bounds for it.
    """
    references = [_reference(model) for model in models]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Add /openapi.json, with the schemas of `bodies`, and /docs. Call it after all routes are there."""
    page = resources.files("pagestream_gateway.api").joinpath("docs.html").read_text(encoding="utf-8")
    document = _document(app, bodies)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        return document

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page)


class _Answers(NamedTuple):
    """The answers of an operation."""

    whole: type[BaseModel] | None
    """The JSON of 200; None for text."""
    errors: Sequence[int]
    events: type[BaseModel] | None = None
    """The data of an event, where 200 may be a stream."""


_GENERATION_ERRORS = (400, 401, 404, 409, 413, 415, 429, 500, 503)
_REQUEST = "/v1/requests/{request_id}"
_ANSWERS: Mapping[tuple[str, str], _Answers] = {
    ("post", "/v1/completions"): _Answers(schemas.CompletionAnswer, _GENERATION_ERRORS, schemas.CompletionChunk),
    ("post", "/v1/chat/completions"): _Answers(schemas.ChatAnswer, _GENERATION_ERRORS, schemas.ChatChunk),
    ("get", "/v1/models"): _Answers(schemas.ModelList, (401, 503)),
    ("get", "/v1/models/{name}"): _Answers(schemas.ModelAnswer, (401, 404, 503)),
    ("get", "/v1/requests"): _Answers(schemas.RequestList, (400, 401, 503)),
    ("get", _REQUEST): _Answers(schemas.RequestAnswer, (401, 404, 503)),
    ("put", _REQUEST): _Answers(schemas.RequestAnswer, _GENERATION_ERRORS),
    ("delete", _REQUEST): _Answers(schemas.RequestAnswer, (401, 404, 503)),
    ("get", f"{_REQUEST}/events"): _Answers(None, (400, 401, 404, 409, 416, 503), schemas.ChatChunk),
}
"""By method and path; operations that are not here answer with text."""


def _document(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    shown: dict[str, type[BaseModel]] = {schemas.ErrorAnswer.__name__: schemas.ErrorAnswer}
    for answers in _ANSWERS.values():
        shown |= {kind.__name__: kind for kind in (answers.whole, answers.events) if kind is not None}
    modes: list[tuple[type[BaseModel], Literal["validation", "serialization"]]] = []
    modes += [(body, "validation") for body in bodies]
    modes += [(answer, "serialization") for answer in shown.values()]
    _, found = models_json_schema(modes, ref_template=_SCHEMA_PATH)
    components = document.setdefault("components", {})
    components["schemas"] = found.get("$defs", {})
    components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"apiKey": []}, {}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = _responses(_ANSWERS.get((method, path)))
    return document


def _responses(answers: _Answers | None) -> dict[str, Any]:
    if answers is None:
        return {"200": {"description": "OK", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    content = {}
    if answers.whole is not None:
        content["application/json"] = {"schema": _reference(answers.whole)}
    if answers.events is not None:
        content["text/event-stream"] = {"schema": _reference(answers.events)}
    wrong = {"application/json": {"schema": _reference(schemas.ErrorAnswer)}}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    return responses | {
        str(status): {"description": HTTPStatus(status).phrase, "content": wrong} for status in answers.errors
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _SCHEMA_PATH.format(model=model.__name__)}
