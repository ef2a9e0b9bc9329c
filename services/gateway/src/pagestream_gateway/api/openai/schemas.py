"""Request bodies of the OpenAI API, with vLLM's extra fields that are honoured here."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pagestream_gateway.errors import InvalidRequest

_HUGE = 1e300  # far beyond any bias


def _only_wrong_bias(value: object) -> object:
    if isinstance(value, dict):
        for name, bias in value.items():
            if type(bias) not in (int, float) or not -_HUGE < bias < _HUGE:
                return {name: bias}
    return value


# A caller hears of one mistake. pydantic would collect those of every element, for each branch of a union: more memory
# than a gateway has, for a body of a few megabytes. So no container may find more than one.
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
Biases = Annotated[dict[str, float], BeforeValidator(_only_wrong_bias)]
Token = Annotated[int, Field(ge=0, lt=2**32)]
BodyModel = TypeVar("BodyModel", bound="Body")

# pydantic reports each branch of a union by itself; callers hear what the field takes as a whole.
_UNIONS = {
    "prompt": "must be a string, a list of strings, a list of token ids or a list of lists of token ids",
    "stop": "must be a string or a list of strings",
    "content": 'must be a string or a list of {"type": "text", "text": ...} parts; other kinds are not supported',
}


class Body(BaseModel):
    """Strict: unknown fields, numbers as strings, NaN and infinity are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, values: object) -> object:
        if not isinstance(values, dict) or len(values.keys() - cls.model_fields.keys()) < 2:
            return values
        first = next(name for name in values if name not in cls.model_fields)
        return {name: value for name, value in values.items() if name in cls.model_fields or name == first}


class StreamOptions(Body):
    """OpenAI's stream_options; obfuscation and vLLM's usage in each chunk change no token and may be asked for in
    vain.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(Body):
    """What both ways of asking have in common. Null is the same as leaving a field out."""

    model: str | None = Field(None, description="Served name; may be left out where exactly one model is served.")
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, description="Choices for each prompt. Default 1.")
    temperature: float | None = Field(None, description="0 is greedy. Default: the model's own, else 1.")
    top_p: float | None = Field(None, description="Nucleus probability in (0, 1].")
    top_k: int | None = Field(None, description="Number of candidates; 0 or -1 is all.")
    min_p: float | None = Field(None, description="Smallest probability relative to the best one, in [0, 1].")
    presence_penalty: float | None = Field(None, description="Taken from tokens that the output has, in [-2, 2].")
    frequency_penalty: float | None = Field(None, description="The same for each time the token is there.")
    repetition_penalty: float | None = Field(
        None, description="Divides or multiplies logits of tokens in prompt and output; above 0. Default 1."
    )
    logit_bias: Biases | None = Field(None, description="Token ids, and what is added to the logit of each.")
    best_of: int | None = Field(None, description="As many as n: a stream shows every choice.")
    seed: int | None = Field(
        None, description="Seed of the noise; the same request with the same seed has the same answer."
    )
    stop: str | Items[str] | None = Field(None, description="The output ends before any of these.")
    stop_token_ids: Items[Token] | None = None
    min_tokens: int | None = None
    max_tokens: int | None = Field(None, description="Most tokens of each choice.")
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-sequence token.")
    skip_special_tokens: bool | None = Field(None, description="Leave special tokens out of the text. Default true.")
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer adds its special tokens to the prompt."
    )
    priority: int | None = Field(None, description="0 is served first.")
    on_disconnect: Literal["cancel", "continue"] | None = Field(
        None, description='When nobody reads: "cancel" after the disconnect grace (default), or "continue".'
    )
    request_id: str | None = Field(None, description="The caller's own id, kept as metadata.")
    # Known fields that can't change the output.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    parallel_tool_calls: Any = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | Items[str] | Items[Token] | Items[Items[Token]] = Field(
        description="Text, token ids, or a list of either; each prompt has n choices."
    )
    echo: bool | None = Field(None, description="Begin each choice with its prompt.")
    logprobs: int | None = Field(
        None, description="Show the log probabilities of the chosen token and of so many likeliest ones."
    )


class TextPart(Body):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation; what else OpenAI's clients send with an assistant's message must be null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: Items[None] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Items[None] | None = None
    tool_call_id: str | None = None
    reasoning_content: None = None

    def text(self) -> str:
        """The content as one text; parts are lines, as in vLLM."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Items[Message]
    logprobs: bool | None = Field(None, description="Show the log probabilities of the chosen tokens.")
    top_logprobs: int | None = Field(None, description="Likeliest tokens at each position; needs logprobs.")
    max_completion_tokens: int | None = Field(None, description="OpenAI's newer name of max_tokens; wins over it.")
    add_generation_prompt: bool | None = Field(None, description="Open the assistant's turn. Default true.")
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message instead of answering it."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further values for the model's chat template."
    )


def parse_body(kind: type[BodyModel], document: dict[str, Any]) -> BodyModel:
    """The body as a model. Raises InvalidRequest that names the field."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise _invalid(first["type"], first["loc"], first["msg"]) from error


def _invalid(kind: str, location: tuple[int | str, ...], message: str) -> InvalidRequest:
    path: list[str] = []
    for step in location:
        path.append(str(step)[:80])
        if step in _UNIONS and kind != "missing":
            message = _UNIONS[str(step)]
            break
    if kind == "extra_forbidden":
        message = "unknown field"
    elif kind == "missing":
        message = "is needed"
    elif kind == "string_unicode":
        message = "half of a surrogate pair is not text"
    return InvalidRequest(".".join(path) or None, message[:1].lower() + message[1:])
