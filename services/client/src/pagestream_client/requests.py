"""From a caller's arguments to GenerateRequest."""

from __future__ import annotations

import enum
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from pagestream.v1 import inference_pb2 as api

from pagestream_client.errors import InvalidRequest


class OnDisconnect(enum.StrEnum):
    """What happens to a request when nobody reads it any more."""

    CANCEL = "cancel"
    """It is cancelled after the gateways' grace; until then it can be resumed."""
    CONTINUE = "continue"
    """It goes on; the result stays readable for the retention time."""


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen: vLLM's names and meanings. What is left out, or None, has the model's default,
    then vLLM's."""

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
    min_tokens: int | None
    max_tokens: int | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None


@dataclass(frozen=True)
class Input:
    """What is to be completed: exactly one of these is given."""

    prompt: str | None = None
    """Text; the tokenizer adds its special tokens."""
    prompt_token_ids: Sequence[int] | None = None
    """Token ids, taken as they are."""
    messages: Sequence[Mapping[str, str]] | None = None
    """A conversation: dictionaries with `role`, `content` and perhaps `name`."""
    continue_final_message: bool = False
    """Whether the last message is a beginning that the model goes on with."""


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
    """The message. Without a key it gets one of its own, so that a retry joins the request of the first try.

    Raises InvalidRequest for what a message can't hold; what is wrong otherwise, the gateway tells.
    """
    request = api.GenerateRequest(
        model=model,
        idempotency_key=idempotency_key or uuid.uuid4().hex,
        on_disconnect=_DISCONNECT[_policy(on_disconnect)],
        client_request_id=client_request_id,
    )
    _set(request, "priority", priority)
    _set_input(request, given)
    for name, value in options.items():
        _set_option(request.sampling, name, value)
    return request


def _policy(given: OnDisconnect | str) -> OnDisconnect:
    try:
        return OnDisconnect(given)
    except ValueError as error:
        expected = " or ".join(repr(each.value) for each in OnDisconnect)
        raise InvalidRequest("on_disconnect", f"expected {expected}, got {given!r}") from error


def _set_input(request: api.GenerateRequest, given: Input) -> None:
    inputs = (given.prompt, given.prompt_token_ids, given.messages)
    if sum(each is not None for each in inputs) != 1:
        raise InvalidRequest("input", "exactly one of prompt, prompt_token_ids and messages must be given")
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


def _set_option(sampling: api.SamplingParams, name: str, value: Any) -> None:
    if value is None:
        return
    if name == "stop":
        _extend(sampling.stop, name, [value] if isinstance(value, str) else value)
    elif name == "stop_token_ids":
        _extend(sampling.stop_token_ids, name, value)
    elif name == "logit_bias":
        try:
            sampling.logit_bias.update(value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(name, f"expected numbers by token id: {error}") from error
    elif name in SamplingOptions.__annotations__:
        _set(sampling, name, value)
    else:
        raise TypeError(f"{name!r} is no sampling option; there are {', '.join(SamplingOptions.__annotations__)}")


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
