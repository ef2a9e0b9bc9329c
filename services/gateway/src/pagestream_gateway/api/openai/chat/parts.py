"""One choice of a chat: its text as OpenAI's content, reasoning_content and tool_calls, whole or in deltas."""

import hashlib
from typing import Any

from pagestream.v1.inference_pb2 import FINISH_REASON_STOP
from pagestream.v1.records_pb2 import ChoiceFinish, RequestSpec
from pagestream_streams.protocol.finish_reasons import finish_reason_name

from pagestream_gateway.core.output.parts import Arguments, CallBegin, Content, Part, Reasoning
from pagestream_gateway.core.output.select import parser_of

_PIECE_CHARS = 4096  # at once: looking for calls takes time by its square
TOOL_CALLS = "tool_calls"
"""OpenAI's finish reason of an answer that calls tools."""


class ChoiceParts:
    """Turns a choice's text into members of deltas, in the order of the log."""

    def __init__(self, spec: RequestSpec, choice: int) -> None:
        self._form = spec.answer.output
        self._parser = parser_of(self._form)
        self._prefix = f"{spec.request_id}:{choice}"
        self._num_calls = 0

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return the delta of a piece of text; {} where it shows nothing yet."""
        parts: list[Part] = []
        for place in range(0, len(text), _PIECE_CHARS):
            parts += self._parser.feed(text[place : place + _PIECE_CHARS])
        if is_last:
            parts += self._parser.end()
        delta: dict[str, Any] = {}
        for part in parts:
            self._add(part, delta)
        return delta

    def finish_reason(self, finish: ChoiceFinish) -> str:
        """Return OpenAI's finish reason: "stop" where the one tool to call was named."""
        has_called = self._num_calls and self._form.tool_format != "named"
        return TOOL_CALLS if has_called and finish.reason == FINISH_REASON_STOP else finish_reason_name(finish.reason)

    def _add(self, part: Part, delta: dict[str, Any]) -> None:
        match part:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case CallBegin(name):
                self._num_calls += 1
                if not self._is_left_out:
                    delta.setdefault(TOOL_CALLS, []).append(
                        {
                            "index": self._num_calls - 1,
                            "id": self._call_id(),
                            "type": "function",
                            "function": {"name": name, "arguments": ""},
                        }
                    )
            case Arguments(text) if not self._is_left_out:
                calls = delta.setdefault(TOOL_CALLS, [])
                if not calls or calls[-1]["index"] != self._num_calls - 1:
                    calls.append({"index": self._num_calls - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text

    @property
    def _is_left_out(self) -> bool:
        return self._form.one_call and self._num_calls > 1

    def _call_id(self) -> str:
        """Return the id of the last call, the same for each reader; Mistral's templates take 9 characters alone."""
        digest = hashlib.sha256(f"{self._prefix}:{self._num_calls}".encode()).hexdigest()
        return digest[:9] if self._form.tool_format == "mistral" else f"call_{digest[:24]}"


def whole_message(spec: RequestSpec, choice: int, text: str, finish: ChoiceFinish) -> tuple[dict[str, Any], str]:
    """Return a choice's message and finish reason."""
    parts = ChoiceParts(spec, choice)
    delta = parts.delta(text, is_last=True)
    calls = [{name: call[name] for name in ("id", "type", "function")} for call in delta.get(TOOL_CALLS, ())]
    message: dict[str, Any] = {"role": "assistant", "content": delta.get("content", None if calls else "")}
    message["refusal"] = None
    if "reasoning_content" in delta:
        message["reasoning_content"] = delta["reasoning_content"]
    if calls:
        message[TOOL_CALLS] = calls
    return message, parts.finish_reason(finish)
