"""POST /v1/completions and /v1/chat/completions, GET /v1/models."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from pagestream_streams.errors import ModelNotFound
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.api.openai.answers import EventStream, Reading, WholeAnswer
from pagestream_gateway.api.openai.body import parse_json, read_body
from pagestream_gateway.api.openai.caller import Door
from pagestream_gateway.api.openai.documents import body_of
from pagestream_gateway.api.openai.drafts import chat_draft, completion_draft
from pagestream_gateway.api.openai.refusals import refuse_for_chat, refuse_for_completions
from pagestream_gateway.api.openai.schemas import ChatBody, CompletionBody, parse_body
from pagestream_gateway.core.calls import CHAT, DISCONNECTED, TEXT_COMPLETION, Call
from pagestream_gateway.core.frontend import Frontend
from pagestream_gateway.core.problems import problem_of
from pagestream_gateway.core.submission import Draft
from pagestream_gateway.errors import InvalidRequest

T = TypeVar("T")

_SMALL_BODY_BYTES = 64 * 1024  # is parsed in less time than a thread takes to answer


def generation_router(frontend: Frontend, door: Door) -> APIRouter:
    """The routes that make requests."""
    router = APIRouter(tags=["generation"])

    async def parsed(request: Request, parse: Callable[[bytes], T]) -> T:
        """What `parse` makes of the body; a large one is not parsed on the event loop."""
        data = await read_body(request, frontend.settings.limits.max_body_bytes)
        return parse(data) if len(data) <= _SMALL_BODY_BYTES else await frontend.pool.run(lambda: parse(data))

    @router.post("/v1/completions", openapi_extra=body_of(CompletionBody), summary="Go on with a prompt")
    async def completions(request: Request) -> Response:
        def parse(data: bytes) -> tuple[Draft, CompletionBody]:
            document = parse_json(data)
            body = parse_body(CompletionBody, refuse_for_completions(document))
            return completion_draft(body, request.headers, document), body

        async def answer(call: Call) -> Response:
            tenant = door.enter(request)
            draft, body = await parsed(request, parse)
            return await _answer(frontend, draft, tenant, call, stream=bool(body.stream))

        return await _counted(frontend.calls.begin("completions", TEXT_COMPLETION, request.headers), answer)

    @router.post("/v1/chat/completions", openapi_extra=body_of(ChatBody), summary="Answer a conversation")
    async def chat_completions(request: Request) -> Response:
        def parse(data: bytes) -> tuple[Draft, ChatBody]:
            document = parse_json(data)
            body = parse_body(ChatBody, refuse_for_chat(document))
            return chat_draft(body, request.headers, document), body

        async def answer(call: Call) -> Response:
            tenant = door.enter(request)
            draft, body = await parsed(request, parse)
            try:
                return await _answer(frontend, draft, tenant, call, stream=bool(body.stream))
            except InvalidRequest as error:
                if error.field == "max_tokens" and body.max_completion_tokens is not None:
                    error.field = "max_completion_tokens"
                elif error.field == "logprobs":
                    error.field = "top_logprobs"
                raise

        return await _counted(frontend.calls.begin("chat", CHAT, request.headers), answer)

    @router.get("/v1/models", summary="The models that this deployment knows")
    async def models(request: Request) -> Response:
        door.enter(request)
        return JSONResponse({"object": "list", "data": await _models(frontend)})

    @router.get("/v1/models/{name:path}", summary="One model")
    async def model(request: Request, name: str) -> Response:
        door.enter(request)
        found = next((card for card in await _models(frontend) if card["id"] == name), None)
        if found is None:
            raise ModelNotFound(name)
        return JSONResponse(found)

    return router


async def _answer(frontend: Frontend, draft: Draft, tenant: str, call: Call, *, stream: bool) -> Response:
    reading = Reading(await frontend.submit(draft, tenant, call), tenant, call)
    return EventStream(frontend, reading) if stream else WholeAnswer(frontend, reading)


async def _counted(call: Call, answer: Callable[[Call], Awaitable[Response]]) -> Response:
    """Ends a call that is refused before there is an answer; the answer ends its own."""
    try:
        return await answer(call)
    except asyncio.CancelledError:
        call.end(DISCONNECTED)
        raise
    except Exception as error:
        call.end(problem_of(error).code)
        raise


async def _models(frontend: Frontend) -> list[dict[str, Any]]:
    return [
        {
            "id": info.name,
            "object": "model",
            "created": info.created,
            "owned_by": "pagestream",
            "root": info.name,
            "max_model_len": card.max_model_len,
        }
        for info, card in await frontend.list_models()
    ]
