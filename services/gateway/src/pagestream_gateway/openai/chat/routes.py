"""The route of POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.calls import CHAT
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.documents import (
    CHAT_EXAMPLE,
    FORM_NAME,
    FORM_SCHEMA,
    GENERATED_HEADERS,
    GENERATION_ERRORS,
    TOOL_ABOUT,
    TOOL_NAME,
    TOOL_SCHEMA,
    Answers,
    AnswersByPath,
    stream_body_of,
)
from pagestream_gateway.openai import generation
from pagestream_gateway.openai.chat.answer import ChatAnswer, ChatChunk, ChatWriter
from pagestream_gateway.openai.chat.body import ChatBody, parse
from pagestream_gateway.openai.errors import ErrorEvent

ANSWERS: AnswersByPath = {
    ("post", "/v1/chat/completions"): Answers(
        ChatAnswer,
        (ChatChunk, ErrorEvent),
        errors=GENERATION_ERRORS,
        headers=GENERATED_HEADERS,
        examples={
            "A question": CHAT_EXAMPLE,
            "A stream": {**CHAT_EXAMPLE, "stream": True, "stream_options": {"include_usage": True}},
            "An answer by a JSON schema": {
                **CHAT_EXAMPLE,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": FORM_NAME, "strict": True, "schema": FORM_SCHEMA},
                },
            },
            "A tool": {
                **CHAT_EXAMPLE,
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": TOOL_NAME, "description": TOOL_ABOUT, "parameters": TOOL_SCHEMA},
                    }
                ],
                "tool_choice": "auto",
            },
        },
    ),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's route."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/chat/completions", openapi_extra=stream_body_of(ChatBody), summary="Answer a conversation")
    async def chat_completions(request: Request) -> Response:
        call = gateway.calls.begin("chat", CHAT, request.headers)
        return await generation.generate(gateway, request, call, parse, writer=ChatWriter)

    return routes
