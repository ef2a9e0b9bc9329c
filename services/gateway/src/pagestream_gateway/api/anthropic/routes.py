"""POST /v1/messages, and the count of a prompt's tokens."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.api.anthropic.answers import MessageStream, WholeMessageAnswer
from pagestream_gateway.api.anthropic.body import CountBody, MessageBody, parse, parse_count
from pagestream_gateway.api.anthropic.writer import MessageWriter, WholeMessage
from pagestream_gateway.api.callers import identify
from pagestream_gateway.api.documents import body_of, stream_body_of
from pagestream_gateway.api.openai import generation
from pagestream_gateway.api.openai.generation import parsed_request
from pagestream_gateway.core.calls import CHAT
from pagestream_gateway.core.gateway import Gateway

PATH = "/v1/messages"


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
