"""Values of fields at their limits, by the field's name; of fields that are not here, the document's schema tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from campaigns.hostile_requests import grammars
from pagestream_gateway import LimitSettings

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT, EMBEDDINGS, SCORE = "/v1/messages/count_tokens", "/v1/embeddings", "/v1/score"
WORDS = ("The", "keeper", "of", "the", "lighthouse", "reads", "a", "long", "book", "about", "sea", "at", "night", ".")
_ODD = ("\n", "\0", "😀", "東京", "e\u0301", "<|im_end|>", "<s>", "</s>", "<tool_call>", "{{ x }}", "\u202e", "a" * 200)


@dataclass(frozen=True)
class Target:
    """What requests are sent to."""

    models: tuple[str, ...]
    """Served names: the model's, then its adapters'."""
    vocab_size: int
    context: int
    """Most tokens of prompt and output together."""
    seats: int
    """Sequences that run at once."""
    first_token_id: int = 0
    """The smallest id that requests name."""
    limits: LimitSettings = field(default_factory=LimitSettings)


@dataclass(frozen=True)
class Draw:
    """From which values are drawn."""

    chance: Random
    target: Target

    def one(self, *values: Any) -> Any:
        """Return one of some values."""
        return self.chance.choice(values)

    def tokens(self, count: int) -> list[int]:
        """Return ids of tokens."""
        return [self.chance.randrange(self.target.first_token_id, self.target.vocab_size) for _ in range(count)]

    def text(self, most: int | None = None) -> str:
        """Return a text: short, long, up to the context's length, or of odd characters."""
        most = most or self.target.context
        if self.chance.random() < 0.15:
            return "".join(self.chance.choice(_ODD) for _ in range(self.chance.choice((1, 8)))) or "x"
        count = self.one(1, 4, 12, 12, 40, most // 4, most // 2)
        return " ".join(self.chance.choice(WORDS) for _ in range(max(1, count)))


def _choices(draw: Draw) -> int:
    seats = draw.target.seats
    return int(draw.one(1, 2, seats - 1, seats, seats + 1, 3 * seats, draw.target.limits.max_n))


def _searched(draw: Draw) -> int:
    return int(draw.one(1, 2, 4, draw.target.seats, draw.target.seats + 1))


def _length(draw: Draw) -> int:
    return int(draw.one(1, 2, 16, 64, 200, draw.target.context - 100, draw.target.context))


def _biases(draw: Draw) -> dict[str, float]:
    most = min(draw.target.limits.max_logit_bias, draw.target.vocab_size)
    count = draw.one(1, 16, most)
    return {
        str(token): draw.one(-100, 100, 0, 1.5) for token in draw.chance.sample(range(draw.target.vocab_size), count)
    }


def _stops(draw: Draw) -> Any:
    limits = draw.target.limits
    return draw.one(
        "e",
        " ",
        ["x" * limits.max_stop_chars] * limits.max_stop,
        [f"{'ab' * 200}{place}" for place in range(limits.max_stop)],
        ["😀", "\n", "."],
        [draw.text(8)],
    )


def _bad_words(draw: Draw) -> list[str]:
    limits = draw.target.limits
    longest = ["the " * (limits.max_bad_word_chars // 4)] * limits.max_bad_words
    return list(draw.one(["e"], list(dict.fromkeys(WORDS)), longest, [chr(97 + place) for place in range(26)]))


def _allowed(draw: Draw) -> list[int]:
    everything = list(range(draw.target.vocab_size))
    repeated = (everything * (1 + draw.target.limits.max_allowed_token_ids // len(everything)))[
        : draw.target.limits.max_allowed_token_ids
    ]
    return list(draw.one([], draw.tokens(1), [1], draw.tokens(10), draw.tokens(500), everything, repeated))


def _prompts(draw: Draw) -> Any:
    most, context = draw.target.limits.max_prompts, draw.target.context
    many = draw.one(2, 13, most)
    match draw.chance.randrange(5):
        case 0:
            return draw.text()
        case 1:
            return draw.tokens(draw.one(1, 15, 16, 17, context // 2, context - 1))
        case 2:
            return [draw.text(context // many) for _ in range(many)]
        case 3:
            return [draw.tokens(draw.one(1, 5, max(1, context // many))) for _ in range(many)]
        case _:
            return ["the same beginning"] * many


def _call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "f0", "arguments": '{"a": 1}'}}


def messages(draw: Draw) -> list[dict[str, Any]]:
    """Return a conversation of OpenAI's form: one question, many turns, parts, calls and their results."""
    count = draw.one(1, 1, 3, 21)
    share = draw.target.context // (2 * count)
    found: list[dict[str, Any]] = [{"role": "system", "content": draw.text(share)}] if draw.one(True, False) else []
    for place in range(count):
        role = "assistant" if place % 2 else "user"
        text = draw.text(share)
        parts = [{"type": "text", "text": text}, {"type": "text", "text": "."}]
        found.append({"role": role, "content": parts if role == "user" and draw.chance.random() < 0.2 else text})
    if draw.chance.random() < 0.2:
        found.append({"role": "assistant", "content": None, "tool_calls": [_call(0), _call(1)]})
        found += [{"role": "tool", "tool_call_id": f"c{place}", "content": draw.text(16)} for place in (0, 1)]
    return found


def _turns(draw: Draw) -> list[dict[str, Any]]:
    """Return a conversation of Anthropic's form."""
    count = draw.one(1, 1, 3, 21)
    texts = [draw.text(draw.target.context // (2 * count)) for _ in range(count)]
    return [{"role": "assistant" if place % 2 else "user", "content": text} for place, text in enumerate(texts)]


def _tools(draw: Draw) -> list[dict[str, Any]]:
    """Return functions: of one, the schema may be large; of many, all are ordinary."""
    count = draw.one(1, 1, 2, 60)
    found = []
    for place in range(count):
        schema = grammars.parameters(draw.chance) if count < 3 else {"type": "object", "properties": {"a": {}}}
        text = "d" * draw.one(0, 20, 4000) if count < 3 else f"does {place}"
        found.append({"name": f"f{place}", "description": text, "parameters": schema})
    return found


def _kwargs(draw: Draw) -> dict[str, Any]:
    return dict(draw.one({}, {"enable_thinking": False}, {"a": {"b": [1] * 100}}, {f"k{n}": n for n in range(50)}))


def _stream_options(draw: Draw) -> dict[str, bool]:
    return dict(draw.one({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}))


def _format(draw: Draw) -> dict[str, Any]:
    named = {"type": "json_schema", "json_schema": {"name": "s", "schema": grammars.schema(draw.chance)}}
    return dict(draw.one({"type": "text"}, {"type": "json_object"}, named, named))


def _text_format(draw: Draw) -> dict[str, Any]:
    named = {"type": "json_schema", "name": "s", "schema": grammars.schema(draw.chance)}
    return {"format": draw.one({"type": "json_object"}, named)}


def _output_config(draw: Draw) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": grammars.schema(draw.chance)}}


VALUES: Mapping[str, Callable[[Draw], Any]] = {
    "model": lambda draw: draw.one(*draw.target.models),
    "n": _choices,
    "best_of": _choices,
    "beam_width": _searched,
    "use_beam_search": lambda _: True,
    "temperature": lambda draw: draw.one(0, 0.0, 1e-9, 1e-3, 1, 2, 1e4, 1e30),
    "top_p": lambda draw: draw.one(1e-12, 0.01, 0.5, 1),
    "top_k": lambda draw: draw.one(-1, 0, 1, 2, draw.target.vocab_size, draw.target.vocab_size + 1, 2**31 - 1),
    "min_p": lambda draw: draw.one(0, 1e-9, 0.5, 1),
    "presence_penalty": lambda draw: draw.one(-2, 0, 2),
    "frequency_penalty": lambda draw: draw.one(-2, 0, 2),
    "repetition_penalty": lambda draw: draw.one(1e-6, 0.5, 1, 1.5, 1e6),
    "length_penalty": lambda draw: draw.one(-10, 0, 1, 10),
    "logit_bias": _biases,
    "seed": lambda draw: draw.one(0, 1, 2**31, 2**63 - 1, -(2**63), -1),
    "stop": _stops,
    "stop_sequences": lambda draw: list(map(str, _stops(draw)))[:4],
    "allowed_token_ids": _allowed,
    "bad_words": _bad_words,
    "stop_token_ids": lambda draw: draw.tokens(draw.one(1, 100, draw.target.limits.max_stop_token_ids)),
    "max_tokens": _length,
    "max_completion_tokens": _length,
    "max_output_tokens": _length,
    "min_tokens": lambda draw: draw.one(0, 1, 16, 200),
    "structured_outputs": lambda draw: grammars.constraint(draw.chance),
    "response_format": _format,
    "text": _text_format,
    "output_config": _output_config,
    "prompt_logprobs": lambda draw: draw.one(0, 1, draw.target.limits.max_logprobs),
    "top_logprobs": lambda draw: draw.one(0, 1, draw.target.limits.max_logprobs),
    "priority": lambda draw: draw.one(0, 1, 2),
    "prompt": _prompts,
    "messages": messages,
    "tools": lambda draw: [{"type": "function", "function": each} for each in _tools(draw)],
    "tool_choice": lambda draw: draw.one("auto", "none", "required", {"type": "function", "function": {"name": "f0"}}),
    "chat_template_kwargs": _kwargs,
    "stream": lambda _: True,
    "stream_options": _stream_options,
    "truncate_prompt_tokens": lambda draw: draw.one(-1, 1, 2, draw.target.context - 1),
    "cache_salt": lambda draw: draw.one("a", "s" * 200),
    "request_id": lambda draw: f"{draw.chance.randrange(2**60):x}" * draw.one(1, 20),
    "input": _prompts,
    "instructions": lambda draw: draw.text(100),
    "system": lambda draw: draw.text(100),
    "include": lambda _: ["message.output_text.logprobs"],
    "text_1": lambda draw: draw.text(40),
    "text_2": lambda draw: [draw.text(40) for _ in range(draw.one(1, 8))],
    "max_tokens_per_query": lambda draw: draw.one(0, 1, 100),
    "max_tokens_per_doc": lambda draw: draw.one(0, 1, 100),
}

OF_PATH: Mapping[tuple[str, str], Callable[[Draw], Any]] = {
    (TEXT, "logprobs"): lambda draw: draw.one(0, 1, draw.target.limits.max_logprobs),
    (CHAT, "logprobs"): lambda _: True,
    (RESPONSES, "input"): lambda draw: draw.one(draw.text(), messages(draw)[:1]),
    (RESPONSES, "tools"): lambda draw: [{"type": "function", **each} for each in _tools(draw)],
    (RESPONSES, "tool_choice"): lambda draw: draw.one("auto", "none", "required", {"type": "function", "name": "f0"}),
    (RESPONSES, "stream_options"): lambda _: {"include_obfuscation": False},
    (MESSAGES, "messages"): _turns,
    (MESSAGES, "tools"): lambda draw: [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in _tools(draw)
    ],
    (MESSAGES, "tool_choice"): lambda draw: draw.one({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f0"}),
    (COUNT, "messages"): _turns,
    (SCORE, "documents"): lambda draw: [draw.text(40)],
}
"""Of one operation, where its form is another."""


def value(draw: Draw, path: str, name: str) -> Any:
    """Draw a field's value. KeyError where only the document has it."""
    return (OF_PATH.get((path, name)) or VALUES[name])(draw)
