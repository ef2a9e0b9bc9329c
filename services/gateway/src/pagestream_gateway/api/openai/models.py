"""GET /v1/models: the models that a deployment serves."""

from typing import Any

from fastapi import APIRouter
from pagestream_streams.errors import ModelNotFound
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.api.callers import identify
from pagestream_gateway.core.gateway import Gateway


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's routes."""
    routes = APIRouter(tags=["generation"])

    @routes.get("/v1/models", summary="The models that this deployment knows")
    async def models(request: Request) -> Response:
        await identify(gateway, request)
        return JSONResponse({"object": "list", "data": await _models(gateway)})

    @routes.get("/v1/models/{name:path}", summary="One model")
    async def model(request: Request, name: str) -> Response:
        await identify(gateway, request)
        found = next((card for card in await _models(gateway) if card["id"] == name), None)
        if found is None:
            raise ModelNotFound(name)
        return JSONResponse(found)

    return routes


async def _models(gateway: Gateway) -> list[dict[str, Any]]:
    """Return the models, then the LoRA adapters of those that are known."""
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
