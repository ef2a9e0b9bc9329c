"""POST /v1/completions: its body, its route and its answers."""

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from typing import Any, Literal

from fastapi import APIRouter
from pagestream.v1.records_pb2 import API_FORM_COMPLETIONS, RequestSpec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.calls import TEXT_COMPLETION
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import parse_body
from pagestream_gateway.http.documents import (
    GENERATION_ERRORS,
    GENERATION_HEADERS,
    Answers,
    AnswersByPath,
    stream_body_of,
)
from pagestream_gateway.openai import generation
from pagestream_gateway.openai.errors import ErrorEvent
from pagestream_gateway.openai.generation import (
    NAMES_BY_FORMAT,
    AnswerSchema,
    AnswerWriter,
    ChoiceSchema,
    ChunkSchema,
    CompletionLogprobs,
    GenerationBody,
    Prompts,
    UsageSchema,
    named_as,
    prompts_of,
    shared_draft,
    with_sampling_parameters,
    without_unsupported,
)
from pagestream_gateway.request import Draft
from pagestream_gateway.streams.events import Run

_DEFAULT_MAX_TOKENS = 16  # OpenAI's and vLLM's
UNSUPPORTED = {**generation.UNSUPPORTED, "suffix": ("",), "prompt_embeds": ()}


@with_sampling_parameters
class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts = Field(description="Text, token ids, or a list of either; each prompt has n choices.")
    echo: bool | None = Field(
        None, description="Begin each choice with its prompt; with `max_tokens` 0 that is all of it."
    )
    logprobs: int | None = Field(
        None, description="Show the log probabilities of the chosen token and of so many likeliest ones."
    )


class CompletionWriter(AnswerWriter):
    """Writes answers as completions; also for requests that came over gRPC and are read over HTTP."""

    chunk_object = whole_object = "text_completion"
    logprobs_form = CompletionLogprobs
    around_delta = ('"text":', "")

    def __init__(self, spec: RequestSpec) -> None:
        super().__init__(spec)
        self._begun: set[int] = set()
        self.needs_history = self.needs_history or spec.answer.token_ids

    def skip(self, run: Run) -> None:
        super().skip(run)
        if not run.prompt_end:
            self._begun.add(run.choice)

    def whole_prompt_ids(self, choice: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompt_ids(choice)}

    def _token_ids(self, run: Run) -> str:
        """Return the ids, with those of the prompt in a choice's first chunk."""
        is_first = run.choice not in self._begun
        self._begun.add(run.choice)
        of_prompt = json.dumps(self.prompt_ids(run.choice) if is_first else None, separators=(",", ":"))
        return f',"prompt_token_ids":{of_prompt}{super()._token_ids(run)}'

    def opening_parts(self) -> list[str]:
        """Return the echoed prompts."""
        if not self.spec.answer.echo_texts:
            return []
        return [f'"text":{encode_basestring_ascii(self._echo(number))}' for number in range(self.num_choices)]

    def message(self, choice: int, text: str) -> dict[str, Any]:
        """Return the text, after the echoed prompt."""
        return {"text": self._echo(choice) + text}

    def _echo(self, choice: int) -> str:
        texts = self.spec.answer.echo_texts
        return texts[choice // max(1, self.spec.sampling.n)] if texts else ""


def parse(document: dict[str, Any], headers: Mapping[str, str]) -> Draft:
    """Read a body and its headers. Raises InvalidRequest."""
    body = parse_body(CompletionBody, without_unsupported(document, UNSUPPORTED))
    own_parameters = {"logprobs": body.logprobs}
    has_no_output = bool(body.echo) and getattr(body, "max_tokens", None) == 0
    is_prompt_alone = has_no_output and body.logprobs is None and getattr(body, "prompt_logprobs", None) is None
    if is_prompt_alone:
        own_parameters["max_tokens"] = 1  # the least that a record can ask for; no engine runs it
    field_names = {} if body.response_format is None else dict(NAMES_BY_FORMAT)
    with named_as(field_names):
        shared = shared_draft(body, headers, document, API_FORM_COMPLETIONS, **own_parameters)
    shared["answer"].constraint_field = field_names.get("structured_outputs", "")
    if body.echo and body.logprobs is not None:
        sampling, shared["answer"].echo_logprobs = shared["sampling"], True
        sampling.prompt_logprobs = max(body.logprobs, sampling.prompt_logprobs)
    return Draft(
        prompts=prompts_of(body.prompt, body.add_special_tokens is not False),
        prompt_field="prompt",
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        echo=bool(body.echo),
        is_prompt_alone=is_prompt_alone,
        field_names=field_names,
        **shared,
    )


class CompletionChoice(ChoiceSchema):
    """A choice of a completion; of a stream, a part of it."""

    text: str


class CompletionAnswer(AnswerSchema):
    """A completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageSchema


class CompletionChunk(ChunkSchema):
    """The data of an event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


ANSWERS: AnswersByPath = {
    ("post", "/v1/completions"): Answers(
        CompletionAnswer,
        (CompletionChunk, ErrorEvent),
        errors=GENERATION_ERRORS,
        headers=GENERATION_HEADERS,
        examples={
            "A beginning": {"prompt": "Once upon a time", "max_tokens": 64},
            "A stream with log probabilities": {
                "prompt": "Once upon a time",
                "max_tokens": 16,
                "logprobs": 2,
                "stream": True,
            },
        },
    ),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the resource's route."""
    routes = APIRouter(tags=["generation"])

    @routes.post("/v1/completions", openapi_extra=stream_body_of(CompletionBody), summary="Go on with a prompt")
    async def completions(request: Request) -> Response:
        call = gateway.calls.begin("completions", TEXT_COMPLETION, request.headers)
        return await generation.generate(gateway, request, call, parse, writer=CompletionWriter)

    return routes
