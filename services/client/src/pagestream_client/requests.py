"""What a caller asks for, and the messages that it becomes: prompt, sampling options, what happens without a reader."""

from __future__ import annotations

import enum
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from pagestream.v1 import inference_pb2 as api

from pagestream_client.errors import InvalidRequest


class OnDisconnect(enum.StrEnum):
    """What happens to a request that has no reader any more."""

    CANCEL = "cancel"
    """It is cancelled after the gateways' grace period; until then it can be resumed."""
    CONTINUE = "continue"
    """It continues; the result stays readable for the retention time."""


class StructuredOutputs(TypedDict, total=False):
    """What the output must match: exactly one of the first five is given."""

    json: str | Mapping[str, Any]
    """A JSON schema."""
    regex: str
    choice: Sequence[str]
    grammar: str
    """Rules in EBNF: Lark's syntax, or GBNF."""
    json_object: bool
    """True: any JSON object."""
    disable_any_whitespace: bool


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters with vLLM's names and meanings. A field that is left out or None has the model's default,
    else vLLM's."""

    n: int | None
    best_of: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    min_tokens: int | None
    max_tokens: int | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    use_beam_search: bool | None
    beam_width: int | None
    length_penalty: float | None
    early_stopping: bool | Literal["never"] | None
    structured_outputs: StructuredOutputs | None


@dataclass(frozen=True)
class Input:
    """What is to be completed: exactly one of the first three is given, else InvalidRequest is raised."""

    prompt: str | None = None
    """Text; the tokenizer adds its special tokens."""
    prompt_token_ids: Sequence[int] | None = None
    """Token ids, taken as they are."""
    messages: Sequence[Mapping[str, str]] | None = None
    """A conversation: dictionaries with `role`, `content` and perhaps `name`."""
    continue_final_message: bool = False
    """Whether the last message is the beginning of the answer, which the model continues."""

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.prompt, self.prompt_token_ids, self.messages)) != 1:
            raise InvalidRequest("input", "exactly one of prompt, prompt_token_ids and messages must be given")


def disconnect_policy(given: OnDisconnect | str) -> OnDisconnect:
    """Return the policy that a caller named. Raises InvalidRequest for an unknown one."""
    try:
        return OnDisconnect(given)
    except ValueError as error:
        expected = " or ".join(repr(each.value) for each in OnDisconnect)
        raise InvalidRequest("on_disconnect", f"expected {expected}, got {given!r}") from error


_DISCONNECT = {OnDisconnect.CANCEL: api.ON_DISCONNECT_CANCEL, OnDisconnect.CONTINUE: api.ON_DISCONNECT_CONTINUE}
_MESSAGE_FIELDS = ("role", "content", "name")


def generate_request(
    model: str,
    given: Input,
    options: SamplingOptions,
    *,
    idempotency_key: str | None,
    on_disconnect: OnDisconnect | str,
    priority: int,
    client_request_id: str,
) -> api.GenerateRequest:
    """Build the message. Without a key it gets a random one, so that a retry joins the request of the first try.

    Raises:
        InvalidRequest: a value that the message cannot hold; all other checks are the gateway's.
    """
    request = api.GenerateRequest(
        model=model,
        idempotency_key=idempotency_key or uuid.uuid4().hex,
        on_disconnect=_DISCONNECT[disconnect_policy(on_disconnect)],
        client_request_id=client_request_id,
    )
    _set(request, "priority", priority)
    _set_input(request, given)
    for name, value in options.items():
        _set_option(request.sampling, name, value)
    return request


def embed_request(model: str, inputs: Sequence[str] | Sequence[Sequence[int]], **given: Any) -> api.EmbedRequest:
    """Build the message, with a key as in `generate_request`.

    Raises:
        InvalidRequest: a value that the message cannot hold; all other checks are the gateway's.
    """
    request = api.EmbedRequest(model=model)
    if inputs and not isinstance(inputs[0], str):
        for number, ids in enumerate(inputs):
            _extend(request.token_ids.add().ids, f"inputs.{number}", ids)
    else:
        _extend(request.texts, "inputs", inputs)
    _set_fields(request, given)
    return request


def score_request(model: str, queries: str | Sequence[str], documents: Sequence[str], **given: Any) -> api.ScoreRequest:
    """Build the message, likewise."""
    request = api.ScoreRequest(model=model)
    _extend(request.queries, "queries", [queries] if isinstance(queries, str) else queries)
    _extend(request.documents, "documents", documents)
    _set_fields(request, given)
    return request


def _set_fields(request: api.EmbedRequest | api.ScoreRequest, given: Mapping[str, Any]) -> None:
    request.on_disconnect = _DISCONNECT[disconnect_policy(given["on_disconnect"])]
    request.idempotency_key = given["idempotency_key"] or uuid.uuid4().hex
    for name, value in given.items():
        if name not in ("on_disconnect", "idempotency_key") and value is not None:
            _set(request, name, value)


def _set_input(request: api.GenerateRequest, given: Input) -> None:
    if given.prompt is not None:
        _set(request, "prompt", given.prompt)
    elif given.prompt_token_ids is not None:
        request.prompt_token_ids.SetInParent()
        _extend(request.prompt_token_ids.ids, "prompt_token_ids", given.prompt_token_ids)
    else:
        request.chat.SetInParent()
        request.chat.continue_final_message = given.continue_final_message
        for number, message in enumerate(given.messages or ()):
            _add_message(request.chat, f"messages.{number}", message)


def _add_message(chat: api.ChatInput, path: str, given: Mapping[str, str]) -> None:
    unknown = given.keys() - set(_MESSAGE_FIELDS)
    if unknown:
        raise InvalidRequest(f"{path}.{min(unknown)}", f"is unknown; a message has {', '.join(_MESSAGE_FIELDS)}")
    message = chat.messages.add()
    for name, value in given.items():
        _set(message, name, value, path=f"{path}.{name}")


_EARLY_STOPPING = {
    False: api.EARLY_STOPPING_UNSPECIFIED,
    True: api.EARLY_STOPPING_TRUE,
    "never": api.EARLY_STOPPING_NEVER,
}


def _set_option(sampling: api.SamplingParams, name: str, value: Any) -> None:
    if value is None:
        return
    if name == "stop":
        _extend(sampling.stop, name, [value] if isinstance(value, str) else value)
    elif name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        _extend(getattr(sampling, name), name, value)
    elif name == "logit_bias":
        try:
            sampling.logit_bias.update(value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(name, f"expected numbers by token id: {error}") from error
    elif name == "early_stopping":
        if value not in _EARLY_STOPPING:
            raise InvalidRequest(name, f"expected True, False or 'never', got {value!r:.80}")
        sampling.early_stopping = _EARLY_STOPPING[value]
    elif name == "structured_outputs":
        _set_constraint(sampling.structured_outputs, value)
    elif name in SamplingOptions.__annotations__:
        _set(sampling, name, value)
    else:
        raise TypeError(f"{name!r} is no sampling option; there are {', '.join(SamplingOptions.__annotations__)}")


def _set_constraint(message: api.StructuredOutputs, given: Mapping[str, Any]) -> None:
    message.SetInParent()
    for name, value in given.items():
        path = f"structured_outputs.{name}"
        if name not in StructuredOutputs.__annotations__:
            raise InvalidRequest(path, f"is unknown; there are {', '.join(StructuredOutputs.__annotations__)}")
        if name == "choice":
            message.choice.SetInParent()
            _extend(message.choice.texts, path, value)
        elif name == "json" and not isinstance(value, str):
            _set(message, name, json.dumps(value, ensure_ascii=False), path=path)
        else:
            _set(message, name, value, path=path)


def _set(message: Any, name: str, value: object, *, path: str = "") -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(path or name, f"{value!r:.80} can't be sent: {error}") from error


def _extend(target: Any, name: str, values: Sequence[object]) -> None:
    try:
        target.extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(name, f"{values!r:.80} can't be sent: {error}") from error
