"""Requests with some fields at their limits: number N of a seed is always the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from campaigns.hostile_requests.fields import Operation, operations
from campaigns.hostile_requests.values import (
    CHAT,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    SCORE,
    TEXT,
    VALUES,
    Draw,
    Target,
    value,
)

FEWEST, MOST = 2, 7
_SHARES = {CHAT: 0.42, TEXT: 0.32, RESPONSES: 0.1, MESSAGES: 0.1, EMBEDDINGS: 0.03, SCORE: 0.03}
_NEEDED = {
    CHAT: ("messages", "max_tokens"),
    TEXT: ("prompt", "max_tokens"),
    RESPONSES: ("input", "max_output_tokens"),
    MESSAGES: ("messages", "max_tokens"),
    EMBEDDINGS: ("input",),
    SCORE: ("text_1", "text_2"),
}
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_BESIDE: Mapping[str, Mapping[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "beam_width": {"use_beam_search": True},
    "length_penalty": {"use_beam_search": True},
    "early_stopping": {"use_beam_search": True},
    "continue_final_message": {"add_generation_prompt": False},
}
"""What a field needs beside it."""
_OF_SEARCH = ("use_beam_search", "beam_width", "length_penalty", "early_stopping")
_NOT_IN_SEARCH = (
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop"),
    *("allowed_token_ids", "bad_words", "prompt_logprobs", "structured_outputs", "response_format", "temperature"),
)
_CONSTRAINTS = ("structured_outputs", "response_format", "text", "output_config", "tools")
_SAME = {"text_1": ("data_1", "queries"), "text_2": ("data_2", "documents", "items")}
_MOST_UNSETTLED = 0.1
"""Share of requests whose fields may contradict each other: those must be refused, and by name."""
_LEAVING = 0.12
_LEAVES_AFTER_S = (0.0, 0.01, 0.05, 0.2, 0.6, 2.0)
_LEAST_WEIGHT = 0.25
"""Of fields of which only the document tells, most of which change nothing; and of those that bring a search along."""
_PROMPT_SHARE = 8
"""Tokens of prompts for each token of output."""


@dataclass(frozen=True)
class HostileRequest:
    """A request as it is sent."""

    number: int
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)
    leaves_after_s: float | None = None
    """Seconds after which its client goes away."""

    def as_json(self) -> dict[str, Any]:
        """Return what `HostileRequest(**...)` makes it of again."""
        return asdict(self)


class Requests:
    """Makes requests.

    Args:
        document: the gateway's OpenAPI document, which names operations and fields.
        target: what they are sent to.
        seed: any text.
        work: most tokens that one request makes an engine compute, all choices together.
    """

    def __init__(self, document: Mapping[str, Any], target: Target, seed: str, work: int) -> None:
        found = operations(document)
        missing = _NEEDED.keys() - found.keys()
        if missing:
            raise ValueError(f"the document does not have {sorted(missing)}")
        self.operations = {path: found[path] for path in _NEEDED}
        self._target, self._seed, self._work = target, seed, work

    def request(self, number: int) -> HostileRequest:
        """Return a request."""
        draw = Draw(Random(f"{self._seed}/{number}"), self._target)
        chance = draw.chance
        operation = self.operations[chance.choices(list(_SHARES), list(_SHARES.values()))[0]]
        body = {name: self._value(draw, operation, name) for name in _NEEDED[operation.path]}
        if chance.random() < 0.6:
            body |= {name: chance.choice((1, 8, 32)) for name in _LENGTHS if name in body}
        for name in self._drawn_names(operation, chance):
            body[name] = self._value(draw, operation, name)
        body.setdefault("model", self._target.models[number % len(self._target.models)])
        if chance.random() > _MOST_UNSETTLED:
            _settle(body, operation, chance)
        self._bound(body)
        headers = {"Accept": "application/x-ndjson"} if body.get("stream") and chance.random() < 0.1 else {}
        leaves_after_s = chance.choice(_LEAVES_AFTER_S) if chance.random() < _LEAVING else None
        return HostileRequest(number, operation.path, body, headers, leaves_after_s)

    def _drawn_names(self, operation: Operation, chance: Random) -> list[str]:
        names = [name for name in operation.fields if name not in _NEEDED[operation.path]]
        is_frequent = {name: name in VALUES and name not in _OF_SEARCH for name in names}
        keys = {name: chance.random() ** (1.0 if is_frequent[name] else 1 / _LEAST_WEIGHT) for name in names}
        return sorted(names, key=lambda name: -keys[name])[: chance.randint(FEWEST, MOST)]

    def _value(self, draw: Draw, operation: Operation, name: str) -> Any:
        try:
            return value(draw, operation.path, name)
        except KeyError:
            return operation.value(name, draw.chance)

    def _bound(self, body: dict[str, Any]) -> None:
        """Hold prompts times choices times length to what engines compute in a moment, however large each is."""
        prompt = body.get("prompt", body.get("input"))
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            room = max(1, self._work * _PROMPT_SHARE // len(prompt))
            bounded = [each[: 4 * room] if isinstance(each, str) else each for each in prompt]
            body["prompt" if "prompt" in body else "input"] = bounded
            prompts = len(prompt)
        else:
            prompts = 1
        each = max(int(body.get(name) or 1) for name in ("n", "best_of", "beam_width"))
        room = max(1, self._work // (prompts * each))
        for name in _LENGTHS:
            if name in body:
                body[name] = min(body[name], room)
        if "min_tokens" in body:
            length = min((body[name] for name in _LENGTHS if name in body), default=16)
            body["min_tokens"] = min(body["min_tokens"], length)


def _settle(body: dict[str, Any], operation: Operation, chance: Random) -> None:
    """Give fields what they need beside them, and take out those that contradict each other."""
    for name in list(body):
        beside = _BESIDE.get(name, {})
        if beside.keys() <= operation.fields.keys():
            body.update(beside)
    if "tool_choice" in body and "tools" not in body:
        del body["tool_choice"]
    if body.get("use_beam_search"):
        for name in _NOT_IN_SEARCH:
            body.pop(name, None)
        if "tools" in body:
            body["tool_choice"] = "none"
    elif any(name in body for name in _OF_SEARCH[1:]):
        body["use_beam_search"] = True
    held = [name for name in _CONSTRAINTS if name in body]
    for name in chance.sample(held, max(0, len(held) - 1)):
        del body[name]
    if "tools" not in body:
        body.pop("tool_choice", None)
    for name, others in _SAME.items():
        if any(other in body for other in others):
            body.pop(name, None)
    if operation.path == CHAT and body.get("continue_final_message"):
        body["messages"] = [*body["messages"], {"role": "assistant", "content": "Once"}]
    for name in ("best_of", "beam_width"):
        if body.get(name):
            body[name] = max(body[name], int(body.get("n") or 1))
    if body.get("logprobs") is False:
        body.pop("top_logprobs", None)
