"""/v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's calls."""

from pathlib import Path
from typing import Literal

from fastapi import APIRouter
from pagestream.v1.records_pb2 import Adapter
from pagestream_streams.admin.adapters import Reload, adapter_revision
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import Body, parse_body, parse_json, read_body
from pagestream_gateway.http.callers import check_operator
from pagestream_gateway.http.documents import CHANGE_ERRORS, Answers, AnswersByPath, body_of

_MAX_BYTES = 64 * 1024
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


ANSWERS: AnswersByPath = {
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
    """Return the resource's routes."""
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
