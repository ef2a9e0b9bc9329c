"""The OpenAPI document, and a page that shows it without fetching anything from outside."""

from importlib import resources
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse, Response

from pagestream_gateway.api.openai.schemas import ChatBody, CompletionBody

_SCHEMA_PATH = "#/components/schemas/{model}"
EVENTS_PARAMETERS: dict[str, Any] = {
    "parameters": [
        {
            "name": "Last-Event-ID",
            "in": "header",
            "schema": {"type": "string"},
            "description": "The id of the last event that was seen: `<request id>/<next index>/<digest>`.",
        },
        {
            "name": "from",
            "in": "query",
            "schema": {"type": "integer", "minimum": 0},
            "description": "The index of the first log entry wanted. Neither this nor Last-Event-ID: from the start.",
        },
    ]
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The part of an operation that documents its body. The body is not read by the framework, which knows no
    bounds.
    """
    schema = {"$ref": _SCHEMA_PATH.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_documents(app: FastAPI) -> None:
    """Adds /openapi.json and /docs."""
    page = resources.files("pagestream_gateway.api.openai").joinpath("docs.html").read_text(encoding="utf-8")
    document = _document(app)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> dict[str, Any]:
        return document

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(page)


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, schemas = models_json_schema(
        [(CompletionBody, "validation"), (ChatBody, "validation")], ref_template=_SCHEMA_PATH
    )
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas.get("$defs", {}))
    components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"apiKey": []}, {}]
    return document
