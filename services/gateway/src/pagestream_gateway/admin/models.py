"""Load and unload models and LoRA adapters.

Bodies and paths are those of llama.cpp's router (/models/load, /models/unload, below /v1 here), of vLLM's sleep mode
(/sleep, /wake_up, /is_sleeping), with a model's name where more than one is served, and of vLLM's adapters
(/v1/load_lora_adapter, /v1/unload_lora_adapter).
"""

from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from pagestream.v1.records_pb2 import Adapter
from pagestream_streams.admin.adapters import Reload, adapter_revision
from pagestream_streams.admin.engine_models import EngineModelsView, Verb
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import Body, parse_body, parse_json, read_body
from pagestream_gateway.http.callers import check_operator
from pagestream_gateway.http.documents import CHANGE_ERRORS, MODEL, Answers, AnswersByPath, body_of

_MAX_BYTES = 64 * 1024
_LEVELS = {"1": Verb.SLEEP, "2": Verb.UNLOAD}
"""Of vLLM's sleep mode: weights stay in host memory, or nothing does."""
_LEVEL = "1"

_MODEL_PARAMETER = {
    "name": "model",
    "in": "query",
    "schema": {"type": "string"},
    "description": "Its name; without it all.",
}
_LEVEL_PARAMETER = {
    "name": "level",
    "in": "query",
    "schema": {"enum": list(_LEVELS), "default": _LEVEL},
    "description": "Of vLLM's sleep mode: 1 keeps weights in host memory, 2 keeps nothing.",
}
_WAKE_PARAMETERS: dict[str, Any] = {"parameters": [_MODEL_PARAMETER]}
_SLEEP_PARAMETERS: dict[str, Any] = {"parameters": [_LEVEL_PARAMETER, _MODEL_PARAMETER]}


class ModelBody(Body):
    """A model to load or unload."""

    model: str = Field(pattern=r"^[^\s{}\x00-\x1f\x7f]{1,256}$", description="Its name, as in GET /v1/models.")


class ModelChangeAnswer(BaseModel):
    """That engines were asked for a change; they make it meanwhile."""

    success: bool


class SleepAnswer(BaseModel):
    """Whether engines sleep."""

    is_sleeping: bool = Field(description="Whether no engine that may sleep serves a model.")


ANSWERS: AnswersByPath = {
    ("post", "/v1/models/load"): Answers(
        ModelChangeAnswer, errors=CHANGE_ERRORS, examples={"By name": {"model": MODEL}}
    ),
    ("post", "/v1/models/unload"): Answers(
        ModelChangeAnswer, errors=CHANGE_ERRORS, examples={"By name": {"model": MODEL}}
    ),
    ("post", "/sleep"): Answers(errors=(400, 401)),
    ("post", "/wake_up"): Answers(errors=(400, 401)),
    ("get", "/is_sleeping"): Answers(SleepAnswer, errors=(401,)),
    ("post", "/v1/load_lora_adapter"): Answers(
        texts=(200,),
        errors=CHANGE_ERRORS,
        examples={"A folder": {"lora_name": "my-adapter", "lora_path": "/adapters/my-adapter"}},
    ),
    ("post", "/v1/unload_lora_adapter"): Answers(
        texts=(200,), errors=CHANGE_ERRORS, examples={"By name": {"lora_name": "my-adapter"}}
    ),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the routes of models."""
    is_open = gateway.settings.gateway.allow_model_changes
    routes = APIRouter(tags=["operation"])
    roster = gateway.broker.engine_models

    async def order(models: list[str], verb: Verb) -> None:
        for name in models:
            await gateway.limit.wait(roster.order(name, verb))

    async def view(request: Request) -> EngineModelsView:
        await check_operator(gateway, request, is_open=is_open)
        return await gateway.limit.wait(roster.read())

    @routes.post("/v1/models/load", openapi_extra=body_of(ModelBody), summary="Have an engine load a model")
    async def load(request: Request) -> Response:
        found = await view(request)
        body = parse_body(ModelBody, parse_json(await read_body(request, _MAX_BYTES)))
        await order([_known(found, body.model)], Verb.LOAD)
        return JSONResponse({"success": True})

    @routes.post("/v1/models/unload", openapi_extra=body_of(ModelBody), summary="Have engines unload a model")
    async def unload(request: Request) -> Response:
        found = await view(request)
        body = parse_body(ModelBody, parse_json(await read_body(request, _MAX_BYTES)))
        await order([_known(found, body.model)], Verb.UNLOAD)
        return JSONResponse({"success": True})

    @routes.post("/sleep", openapi_extra=_SLEEP_PARAMETERS, summary="Have engines free memory, with or without weights")
    async def sleep(request: Request) -> Response:
        found = await view(request)
        level = request.query_params.get("level", _LEVEL)
        if level not in _LEVELS:
            raise InvalidRequest("level", f"is {level!r}; 1, which keeps weights in host memory, or 2 is expected")
        name = request.query_params.get("model", "")
        serving = {row.serving for row in found.engines.values() if row.serving}
        kept = {row.keeps for row in found.engines.values() if row.keeps and level == "2"}
        await order([_known(found, name)] if name else sorted(serving | kept), _LEVELS[level])
        return Response()

    @routes.post("/wake_up", openapi_extra=_WAKE_PARAMETERS, summary="Have engines load the models that they had")
    async def wake_up(request: Request) -> Response:
        found = await view(request)
        name = request.query_params.get("model", "")
        held = {row.last for row in found.engines.values() if row.last}
        await order([_known(found, name)] if name else sorted(held), Verb.LOAD)
        return Response()

    @routes.get("/is_sleeping", summary="Whether all engines that may sleep do")
    async def is_sleeping(request: Request) -> Response:
        rows = (await view(request)).engines.values()
        return JSONResponse({"is_sleeping": bool(rows) and not any(row.serving for row in rows)})

    return routes


def _known(view: EngineModelsView, name: str) -> str:
    listed = sorted({each for row in view.engines.values() for each in row.models})
    if name not in listed:
        expected = f"one of {', '.join(listed)} is expected" if listed else "no engine may change its model"
        raise InvalidRequest("model", f"{name!r} is on no engine's list; {expected}")
    return name


_NAME = r"^[^\s{}\x00-\x1f\x7f]{1,256}$"


class LoadBody(Body):
    """An adapter to load."""

    lora_name: str = Field(pattern=_NAME, description="The name that requests give as their model.")
    lora_path: str = Field(
        pattern=r"^[^\x00]{1,4096}$", description="Its folder in PEFT's format, where engines find it."
    )
    load_inplace: bool | None = Field(
        None, description="Whether it takes the place of one that is loaded under its name, which is refused otherwise."
    )
    is_3d_lora_weight: Literal[False] | None = Field(None, description="Of experts' matrices: not supported.")
    base_model_name: str = Field(
        "", max_length=256, description="The model that it changes; may be left out where there is one."
    )
    revision: str = Field(
        "", pattern="^([0-9a-f]{32})?$", description="Digest of its files, where this gateway can't read them."
    )


class UnloadBody(Body):
    """An adapter to unload."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = Field(None, description="vLLM's number; means nothing here.")


def adapters_router(gateway: Gateway) -> APIRouter:
    """Return the routes of adapters."""
    is_open = gateway.settings.gateway.allow_runtime_lora
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/load_lora_adapter", openapi_extra=body_of(LoadBody), summary="Let requests name a LoRA adapter")
    async def load(request: Request) -> Response:
        await check_operator(gateway, request, is_open=is_open)
        body = parse_body(LoadBody, parse_json(await read_body(request, _MAX_BYTES)))
        if any(info.name == body.lora_name for info, _ in await gateway.models.list_models()):
            raise InvalidRequest("lora_name", f"{body.lora_name!r} is a model's name; load the adapter under another")
        model = await gateway.models.resolve(body.base_model_name)
        if model.adapter is not None and body.base_model_name:
            raise InvalidRequest("base_model_name", f"{body.base_model_name!r} is an adapter; name its base model")
        revision = body.revision or await run_in_threadpool(adapter_revision, Path(body.lora_path))
        adapter = Adapter(name=body.lora_name, model=model.name, path=body.lora_path, revision=revision)
        reload = Reload.REPLACE if body.load_inplace else Reload.REFUSE
        await gateway.limit.wait(gateway.broker.adapters.publish(adapter, reload))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", openapi_extra=body_of(UnloadBody), summary="Let none name it any more")
    async def unload(request: Request) -> Response:
        await check_operator(gateway, request, is_open=is_open)
        body = parse_body(UnloadBody, parse_json(await read_body(request, _MAX_BYTES)))
        await gateway.limit.wait(gateway.broker.adapters.withdraw(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes
