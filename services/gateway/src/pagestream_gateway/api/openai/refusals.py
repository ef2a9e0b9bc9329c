"""Fields of OpenAI's and vLLM's APIs that would change the output and that nothing here honours yet.

Each stands with the values that ask for nothing: client libraries send those unasked. Any other value is refused by
name, since silently ignoring it would answer another question than the one that was asked.
"""

from collections.abc import Mapping
from typing import Any

from pagestream_gateway.errors import UnsupportedField

_BOTH: Mapping[str, tuple[Any, ...]] = {
    "prompt_logprobs": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "response_format": ({"type": "text"},),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "cache_salt": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
}
_CHAT: Mapping[str, tuple[Any, ...]] = {
    **_BOTH,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "echo": (False,),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": (),
    "include_reasoning": (True,),
}
_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {**_BOTH, "suffix": ("",), "prompt_embeds": ()}


def refuse_for_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without the fields that ask for nothing. Raises UnsupportedField."""
    return _refuse(body, _CHAT)


def refuse_for_completions(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body without the fields that ask for nothing. Raises UnsupportedField."""
    return _refuse(body, _COMPLETIONS)


def _refuse(body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    kept = {}
    for name, value in body.items():
        neutral = table.get(name)
        if neutral is None:
            kept[name] = value
        elif value is not None and not any(type(value) is type(nothing) and value == nothing for nothing in neutral):
            raise UnsupportedField(name)
    return kept
