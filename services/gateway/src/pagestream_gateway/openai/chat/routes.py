"""The route of POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.calls import CHAT
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.documents import stream_body_of
from pagestream_gateway.openai import generation
from pagestream_gateway.openai.chat.answer import ChatWriter
from pagestream_gateway.openai.chat.body import ChatBody, parse


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's route."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/chat/completions", openapi_extra=stream_body_of(ChatBody), summary="Answer a conversation")
    async def chat_completions(request: Request) -> Response:
        call = gateway.calls.begin("chat", CHAT, request.headers)
        return await generation.generate(gateway, request, call, parse, writer=ChatWriter)

    return routes
