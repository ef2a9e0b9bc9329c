"""GET /v1/models: the models that a deployment serves."""

from typing import Any, Literal

from fastapi import APIRouter
from pagestream_streams.errors import ModelNotFound
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.auth.identity import Identity
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.callers import identify
from pagestream_gateway.http.documents import Answers, AnswersByPath


class ModelAnswer(BaseModel):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    engines: int = Field(description="Engines that live now.")
    deterministic: bool = Field(
        description="Whether the last engine to publish it computes each sequence alike in any batch, bit for bit."
    )


class ModelList(BaseModel):
    """The models by name."""

    object: Literal["list"]
    data: list[ModelAnswer]


ANSWERS: AnswersByPath = {
    ("get", "/v1/models"): Answers(ModelList, errors=(401,)),
    ("get", "/v1/models/{name}"): Answers(ModelAnswer, errors=(401, 404)),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's routes."""
    routes = APIRouter(tags=["generation"])

    @routes.get("/v1/models", summary="The models that this deployment knows")
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await _models(gateway, await identify(gateway, request))})

    @routes.get("/v1/models/{name:path}", summary="One model")
    async def model(request: Request, name: str) -> Response:
        models = await _models(gateway, await identify(gateway, request))
        found = next((card for card in models if card["id"] == name), None)
        if found is None:
            raise ModelNotFound(name)
        return JSONResponse(found)

    return routes


async def _models(gateway: Gateway, identity: Identity) -> list[dict[str, Any]]:
    """Return the models that a caller may use, then such LoRA adapters of those that are known, then aliases."""
    found = await _all_models(gateway)
    allowed = {each["id"]: each for each in found if gateway.submission.tenants.allows(identity, each["id"])}
    aliases = gateway.models.aliases.items()
    return [*allowed.values(), *(allowed[name] | {"id": alias} for alias, name in aliases if name in allowed)]


async def _all_models(gateway: Gateway) -> list[dict[str, Any]]:
    models = await _base_models(gateway)
    by_name = {model["id"]: model for model in models}
    adapters = [each for each in await gateway.models.list_adapters() if each.model in by_name]
    return models + [
        by_name[each.model]
        | {"id": each.name, "created": each.created, "root": each.path, "parent": each.model, "revision": each.revision}
        for each in adapters
    ]


async def _base_models(gateway: Gateway) -> list[dict[str, Any]]:
    return [
        {
            "id": info.name,
            "object": "model",
            "created": info.created,
            "owned_by": "pagestream",
            "root": info.name,
            "max_model_len": card.max_model_len,
            "engines": info.engines,
            "deterministic": card.deterministic,
        }
        for info, card in await gateway.models.list_models()
    ]
