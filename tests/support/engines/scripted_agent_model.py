"""A model for agents whose every word is written down: the text of a turn follows from the tool results before it.

Nothing that an agent is told comes from weights, so that it runs no other commands than those of the script.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from json import dumps
from typing import Any

from pagestream.v1.records_pb2 import ModelCard, RequestSpec
from support.engines.synthetic_engine import byte_tokenizer, synthetic_card
from tokenizers import Tokenizer

NAME = "scripted"
_TOOLS, _RESULT = "[tools]", "</s>[tool]"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}[tools]{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ eos_token }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Calls are of the format `hermes`."""
ASIDE = "A note about a lighthouse."
"""The answer to requests without tools: titles, summaries and the like."""


def card(max_model_len: int) -> ModelCard:
    """Return the card of the model, which has a token for each byte."""
    return synthetic_card(NAME, max_model_len=max_model_len, chat_template=TEMPLATE)


def call(name: str, arguments: Mapping[str, Any], said: str = "") -> str:
    """Return a turn that calls a tool."""
    return f"{said}<tool_call>{dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Script:
    """Says the n-th turn to a conversation with n tool results; what has no tools is answered aside."""

    def __init__(self, turns: Sequence[str]) -> None:
        self._turns = turns

    def __call__(self, spec: RequestSpec) -> str:
        return self._turns[min(num_results(spec), len(self._turns) - 1)] if shows_tools(spec) else ASIDE


def shows_tools(spec: RequestSpec) -> bool:
    """Return whether a request's prompt has tools."""
    return _TOOLS in prompt_of(spec)


def num_results(spec: RequestSpec) -> int:
    """Return how many results of tools a request's prompt has."""
    return prompt_of(spec).count(_RESULT)


def prompt_of(spec: RequestSpec) -> str:
    """Return the text of a request's prompt, special tokens included."""
    text: str = _tokenizer().decode(list(spec.prompts[0].ids), skip_special_tokens=False)
    return text


@cache
def _tokenizer() -> Tokenizer:
    return byte_tokenizer()
