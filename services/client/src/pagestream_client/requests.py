"""What a caller asks for: prompt, sampling options, and what happens without a reader."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

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
