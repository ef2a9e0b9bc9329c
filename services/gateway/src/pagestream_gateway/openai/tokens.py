"""/tokenize and /detokenize: vLLM's calls, which make the tokens that a request with the same fields would have."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import AnswerForm
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import Body, Items, Token, parse_body
from pagestream_gateway.http.callers import identify
from pagestream_gateway.http.documents import MESSAGES, Answers, AnswersByPath, body_of
from pagestream_gateway.models import LoadedModel
from pagestream_gateway.openai.chat import Message
from pagestream_gateway.openai.generation import SERVED_NAME, PromptedBody, parsed_request, without_unsupported
from pagestream_gateway.openai.tools import Tool, chat_tools, tools_of
from pagestream_gateway.preparation import most_counted_tokens
from pagestream_gateway.request import ChatPrompt, Draft, Prompt, TextPrompt

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}
"""Fields of vLLM's body that are not supported, each with the values that ask for nothing."""
_BATCH = 4096  # tokens that are written at once


class TokenizeBody(PromptedBody):
    """A text or a conversation."""

    model: str | None = Field(None, description=SERVED_NAME)
    prompt: str | None = Field(None, description="Text; this or messages.")
    messages: Items[Message] | None = None
    tools: Items[Tool] | None = None
    add_special_tokens: bool | None = Field(None, description="Default true for text, false for messages.")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(None, description="Show each token as the vocabulary spells it.")


class DetokenizeBody(Body):
    """Tokens."""

    model: str | None = Field(None, description=SERVED_NAME)
    tokens: Items[Token]


class TokenizeAnswer(BaseModel):
    """The tokens of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = Field(description="Each token as the vocabulary spells it, where asked for.")


class DetokenizeAnswer(BaseModel):
    """The text of tokens."""

    prompt: str


ANSWERS: AnswersByPath = {
    ("post", "/tokenize"): Answers(
        TokenizeAnswer,
        errors=(401, 404, 413, 415, 429),
        examples={"A text": {"prompt": "Once upon a time"}, "A conversation": {"messages": MESSAGES}},
    ),
    ("post", "/detokenize"): Answers(
        DetokenizeAnswer, errors=(401, 404, 413, 415, 429), examples={"Three tokens": {"tokens": [1, 2, 3]}}
    ),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's routes."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/tokenize", openapi_extra=body_of(TokenizeBody), summary="The tokens of a text or a conversation")
    async def tokenize(request: Request) -> Response:
        identity = await identify(gateway, request)
        async with parsed_request(gateway, request, _parse) as body:
            model, tokens = await gateway.submission.tokens(_draft(body), identity)
            shows_texts = bool(body.return_token_strs)
            answer = await gateway.pool.run(lambda: _answer(model, tokens, shows_texts=shows_texts))
        return Response(answer, media_type="application/json")

    @routes.post("/detokenize", openapi_extra=body_of(DetokenizeBody), summary="The text of tokens")
    async def detokenize(request: Request) -> Response:
        identity = await identify(gateway, request)
        async with parsed_request(gateway, request, lambda document, _: parse_body(DetokenizeBody, document)) as body:
            model = await gateway.submission.resolve(body.model or "", identity)
            most = most_counted_tokens(model.max_model_len, gateway.settings.limits)
            if len(body.tokens) > most:
                raise InvalidRequest("tokens", f"at most {most}, got {len(body.tokens)}")
            if (wrong := next((each for each in body.tokens if each >= model.card.vocab_size), None)) is not None:
                raise InvalidRequest(
                    "tokens", f"{wrong} is not a token of the model (0 to {model.card.vocab_size - 1})"
                )
            text = await gateway.pool.run(lambda: _decode(model, body.tokens))
        return JSONResponse({"prompt": text})

    return routes


def _parse(document: dict[str, Any], _: Mapping[str, str]) -> TokenizeBody:
    tools = chat_tools(document.get("tools"), None)
    parsed_apart = {} if tools is None else {"tools": None}
    body = parse_body(TokenizeBody, without_unsupported({**document, **parsed_apart}, UNSUPPORTED))
    body.tools = tools
    return body


def _answer(model: LoadedModel, tokens: Sequence[int], *, shows_texts: bool) -> bytes:
    """Return the JSON of a text's tokens, a few at a time: `json.dumps` keeps Python's lock until it has all."""
    parts = [f'{{"count":{len(tokens)},"max_model_len":{model.max_model_len},"tokens":[']
    parts += [("," if start else "") + ",".join(map(str, some)) for start, some in _batches(tokens)]
    parts.append('],"token_strs":' + ("[" if shows_texts else "null"))
    for start, some in _batches(tokens) if shows_texts else ():
        texts = json.dumps([model.tokenizer.id_to_token(token) or "" for token in some])
        parts.append(("," if start else "") + texts[1:-1])
    parts.append("]}" if shows_texts else "}")
    return "".join(parts).encode()


def _decode(model: LoadedModel, tokens: list[int]) -> str:
    """Return the text of tokens; in contrast to `Tokenizer.decode` this releases Python's lock."""
    (text,) = model.tokenizer.decode_batch([tokens], skip_special_tokens=False)
    return str(text)


def _batches(tokens: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    return ((start, tokens[start : start + _BATCH]) for start in range(0, len(tokens), _BATCH))


def _draft(body: TokenizeBody) -> Draft:
    """Return what would be generated from. Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt", "exactly one of prompt and messages is needed")
    prompt: Prompt
    if body.messages is None:
        prompt = TextPrompt(body.prompt or "", body.add_special_tokens is not False)
    else:
        prompt = ChatPrompt(
            messages=[message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            arguments=body.chat_template_kwargs or {},
            add_special_tokens=bool(body.add_special_tokens),
            tools=tools_of(body.tools, None, None),
        )
    field = "prompt" if body.messages is None else "messages"
    return Draft(
        model=body.model or "", prompts=[prompt], prompt_field=field, sampling=SamplingParams(), answer=AnswerForm()
    )
