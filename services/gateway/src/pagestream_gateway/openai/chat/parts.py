"""One choice of a chat: its text as OpenAI's content, reasoning and tool_calls, whole or in deltas."""

from collections.abc import Iterable, Iterator
from typing import Any

from pagestream.v1.inference_pb2 import FINISH_REASON_STOP
from pagestream.v1.records_pb2 import ChoiceFinish, RequestSpec
from pagestream_streams.protocol.records import finish_reason_name

from pagestream_gateway.output_formats.formats import call_id, parser_of
from pagestream_gateway.output_formats.parts import Arguments, CallBegin, Content, Part, Reasoning

_PIECE_CHARS = 4096  # at once: looking for calls takes time by its square
_REASONING, _OLD_REASONING = "reasoning", "reasoning_content"
"""vLLM's name, and the one that DeepSeek and older clients have: both are written."""
TOOL_CALLS = "tool_calls"
"""OpenAI's finish reason of an answer that calls tools."""


class ChoiceReader:
    """Divides a choice's text, in the order of the log, as the request's record says."""

    def __init__(self, spec: RequestSpec, choice: int, *, with_hidden: bool = False) -> None:
        """`with_hidden`: reasoning is a part also where the request leaves it out of its answer."""
        self.form = spec.answer.output
        self._leaves_out_reasoning = self.form.hides_reasoning and not with_hidden
        self.has_reasoned = False
        self.num_calls = 0
        """Calls that have begun, with those that are left out."""
        self._parser = parser_of(self.form)
        self._prefix = f"{spec.request_id}:{choice}"

    def read(self, text: str, *, is_last: bool) -> Iterator[Part]:
        """Yield the parts that a piece of text completes, without calls beside the one that is wanted."""
        for place in range(0, len(text), _PIECE_CHARS):
            yield from self._shown(self._parser.feed(text[place : place + _PIECE_CHARS]))
        if is_last:
            yield from self._shown(self._parser.end())

    def call_id(self) -> str:
        """Return the id of the last call, the same for each reader."""
        return call_id(f"{self._prefix}:{self.num_calls}", self.form)

    def _shown(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, CallBegin):
                self.num_calls += 1
            self.has_reasoned = self.has_reasoned or isinstance(part, Reasoning)
            is_of_call = isinstance(part, CallBegin | Arguments)
            is_left_out = is_of_call and self.form.one_call and self.num_calls > 1
            if not (is_left_out or (self._leaves_out_reasoning and isinstance(part, Reasoning))):
                yield part


class ChoiceParts:
    """Turns a choice's text into members of deltas, in the order of the log.

    Reasoning tokens are those of whole pieces: where they are counted, a piece is one entry of the log.
    """

    def __init__(self, spec: RequestSpec, choice: int) -> None:
        self._reader = ChoiceReader(spec, choice)
        self._is_answering = False
        self._num_tokens = 0
        self.num_reasoning_tokens = 0
        """Tokens before the first one of the answer, where there is reasoning: with its markers."""

    def delta(self, text: str, *, is_last: bool, num_tokens: int = 0) -> dict[str, Any]:
        """Return the delta of a piece of text, which has so many tokens; {} where it shows nothing yet."""
        delta: dict[str, Any] = {}
        for part in self._reader.read(text, is_last=is_last):
            self._add(part, delta)
        self._num_tokens += num_tokens
        self._is_answering = self._is_answering or "content" in delta or TOOL_CALLS in delta
        if self._reader.has_reasoned and not self._is_answering:
            self.num_reasoning_tokens = self._num_tokens
        return delta

    def finish_reason(self, finish: ChoiceFinish) -> str:
        """Return OpenAI's finish reason: "stop" where the one tool to call was named."""
        has_called = self._reader.num_calls and self._reader.form.tool_format != "named"
        return TOOL_CALLS if has_called and finish.reason == FINISH_REASON_STOP else finish_reason_name(finish.reason)

    def _add(self, part: Part, delta: dict[str, Any]) -> None:
        match part:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta[_REASONING] = delta[_OLD_REASONING] = delta.get(_REASONING, "") + text
            case CallBegin(name):
                delta.setdefault(TOOL_CALLS, []).append(
                    {
                        "index": self._reader.num_calls - 1,
                        "id": self._reader.call_id(),
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                )
            case Arguments(text):
                calls, index = delta.setdefault(TOOL_CALLS, []), self._reader.num_calls - 1
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text


def whole_message(spec: RequestSpec, choice: int, text: str, finish: ChoiceFinish) -> tuple[dict[str, Any], str]:
    """Return a choice's message and finish reason."""
    parts = ChoiceParts(spec, choice)
    delta = parts.delta(text, is_last=True)
    calls = [{name: call[name] for name in ("id", "type", "function")} for call in delta.get(TOOL_CALLS, ())]
    message: dict[str, Any] = {"role": "assistant", "content": delta.get("content", None if calls else "")}
    message["refusal"] = None
    for name in (_REASONING, _OLD_REASONING):
        if name in delta:
            message[name] = delta[name]
    if calls:
        message[TOOL_CALLS] = calls
    return message, parts.finish_reason(finish)
