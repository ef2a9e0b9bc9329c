"""The OpenAPI document, and a page that shows it without fetching anything from outside."""

from collections.abc import Sequence
from importlib import resources
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse, Response

_SCHEMA_PATH = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the part of an operation that documents its body.

    The framework does not read the body itself, since it has no bounds for it.
    """
    schema = {"$ref": _SCHEMA_PATH.format(model=model.__name__)}
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


def _document(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_SCHEMA_PATH)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas.get("$defs", {}))
    components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"apiKey": []}, {}]
    return document
