"""POST /v1/messages, and the count of a prompt's tokens."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.anthropic.answer import (
    MESSAGE_REFUSALS,
    MessageAnswer,
    MessageEvent,
    MessageStream,
    MessageTokens,
    MessageWriter,
    WholeMessage,
    WholeMessageAnswer,
)
from pagestream_gateway.anthropic.body import CountBody, MessageBody, parse, parse_count
from pagestream_gateway.calls import CHAT
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.callers import identify
from pagestream_gateway.http.documents import (
    ANTHROPIC_HEADERS,
    CHAT_EXAMPLE,
    GENERATION_ERRORS,
    MESSAGES,
    TOOL_ABOUT,
    TOOL_NAME,
    TOOL_SCHEMA,
    Answers,
    AnswersByPath,
    body_of,
    stream_body_of,
)
from pagestream_gateway.openai import generation
from pagestream_gateway.openai.generation import parsed_request

PATH = "/v1/messages"


ANSWERS: AnswersByPath = {
    ("post", "/v1/messages"): Answers(
        MessageAnswer,
        (MessageEvent,),
        errors=GENERATION_ERRORS,
        headers=ANTHROPIC_HEADERS,
        refusals=MESSAGE_REFUSALS,
        examples={
            "A question": CHAT_EXAMPLE,
            "A stream": {**CHAT_EXAMPLE, "stream": True},
            "A tool": {
                **CHAT_EXAMPLE,
                "tools": [{"name": TOOL_NAME, "description": TOOL_ABOUT, "input_schema": TOOL_SCHEMA}],
            },
        },
    ),
    ("post", "/v1/messages/count_tokens"): Answers(
        MessageTokens,
        errors=(401, 404, 413, 415, 429),
        refusals=MESSAGE_REFUSALS,
        examples={"A question": {"messages": MESSAGES}},
    ),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's routes."""
    routes = APIRouter(tags=["messages"])

    @routes.post(PATH, openapi_extra=stream_body_of(MessageBody), summary="Answer a conversation with a message")
    async def create(request: Request) -> Response:
        call = gateway.calls.begin("messages", CHAT, request.headers)
        return await generation.generate(
            gateway,
            request,
            call,
            parse,
            writer=MessageWriter,
            body=WholeMessage,
            stream=MessageStream,
            whole=WholeMessageAnswer,
        )

    @routes.post(f"{PATH}/count_tokens", openapi_extra=body_of(CountBody), summary="The tokens of a message's prompt")
    async def count_tokens(request: Request) -> Response:
        identity = await identify(gateway, request)
        async with parsed_request(gateway, request, parse_count) as draft:
            _, tokens = await gateway.submission.tokens(draft, identity)
        return JSONResponse({"input_tokens": len(tokens)})

    return routes
