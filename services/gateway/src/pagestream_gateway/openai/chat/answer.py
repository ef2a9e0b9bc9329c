"""Chat completions: a choice's text as content, reasoning and tool calls, in chunks and as a whole message."""

import json
from collections.abc import Iterable, Iterator, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Literal

from pagestream.v1.inference_pb2 import FINISH_REASON_STOP, Usage
from pagestream.v1.records_pb2 import ChoiceFinish, LogEntry, RequestSpec
from pagestream_grammars.output_formats.parts import Arguments, CallBegin, Content, Part, Reasoning
from pagestream_streams.protocol.records import finish_reason_name
from pydantic import BaseModel, Field

from pagestream_gateway.openai.logprobs import ChatLogprobs
from pagestream_gateway.openai.writer import AnswerSchema, AnswerWriter, ChoiceSchema, ChunkSchema, UsageSchema
from pagestream_gateway.output_formats.formats import call_id, parser_of
from pagestream_gateway.streams.runs import Run, split_runs


class ChatWriter(AnswerWriter):
    """Writes answers as chat completions."""

    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"
    logprobs_form = ChatLogprobs
    shows_prompts_by_choice = False

    def __init__(self, spec: RequestSpec) -> None:
        super().__init__(spec)
        self._is_parted = spec.answer.HasField("output")
        self._parts: dict[int, ChoiceParts] = {}
        self._reasons = bool(spec.answer.output.reasoning_format)
        self.needs_history = self.needs_history or self._is_parted

    def skip(self, run: Run) -> None:
        super().skip(run)
        if self._is_parted and not run.prompt_end:
            self._delta(run)

    def split(self, first_index: int, entries: Sequence[LogEntry]) -> list[Run]:
        """Return a run for each entry where tokens of reasoning are counted, whatever came together."""
        if not self._reasons:
            return super().split(first_index, entries)
        return [run for index, entry in enumerate(entries, first_index) for run in split_runs(index, [entry])]

    def count_usage(self, run: Run) -> None:
        if self._reasons and not run.prompt_end:
            self._delta(run)

    def usage_body(self, usage: Usage, choices: Iterable[int] | None = None) -> dict[str, Any]:
        body = super().usage_body(usage)
        if self._reasons:
            parts = [self._parts[each] for each in (self._parts if choices is None else choices) if each in self._parts]
            body["completion_tokens_details"] = {"reasoning_tokens": sum(each.num_reasoning_tokens for each in parts)}
        return body

    def whole(self, usage: Usage) -> dict[str, Any]:
        members = super().whole(usage)
        return {**members, "prompt_token_ids": self.prompt_ids(0)} if self.spec.answer.token_ids else members

    def _opening_members(self) -> str:
        ids = self.prompt_ids(0) if self.spec.answer.token_ids else None
        return "" if ids is None else f',"prompt_token_ids":{json.dumps(ids, separators=(",", ":"))}'

    def opening_parts(self) -> list[str]:
        """Return the roles."""
        return ['"delta":{"role":"assistant","content":""}'] * self.num_choices

    def delta(self, run: Run) -> str:
        """Return a run's text; a finish without text has an empty delta."""
        if self._is_parted:
            return f'"delta":{json.dumps(self._delta(run), separators=(",", ":"))}'
        if run.finish is not None and not run.text:
            return '"delta":{}'
        return f'"delta":{{"content":{encode_basestring_ascii(run.text)}}}'

    def finish_reason(self, choice: int, finish: ChoiceFinish) -> str:
        return self._parts[choice].finish_reason(finish) if self._is_parted else super().finish_reason(choice, finish)

    def message(self, choice: int, text: str) -> dict[str, Any]:
        """Return the assistant's message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def whole_choice(self, number: int, text: str, finish: ChoiceFinish) -> dict[str, Any]:
        members = super().whole_choice(number, text, finish)
        if self._is_parted:
            members["message"], members["finish_reason"] = whole_message(self.spec, number, text, finish)
        return members

    def _delta(self, run: Run) -> dict[str, Any]:
        parts = self._parts.get(run.choice)
        if parts is None:
            parts = self._parts[run.choice] = ChoiceParts(self.spec, run.choice)
        return parts.delta(run.text, is_last=run.finish is not None, num_tokens=len(run.token_ids))


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


class CalledFunctionSchema(BaseModel):
    """A function that is called."""

    name: str | None = Field(None, description="In the first delta of a call.")
    arguments: str = Field(description="JSON text; of a delta, a piece of it.")


class ToolCallSchema(BaseModel):
    """A call of a tool, or a piece of one."""

    index: int | None = Field(None, description="Of the call, in deltas.")
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionSchema


class ChatMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None = Field(description="null where there are tool calls alone.")
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallSchema] | None = None


class ChatChoice(ChoiceSchema):
    """A choice of a chat completion."""

    message: ChatMessage


class ChatDelta(BaseModel):
    """A part of the assistant's message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallSchema] | None = None


class ChatChunkChoice(ChoiceSchema):
    """A part of a choice of a chat completion."""

    delta: ChatDelta


class ChatAnswer(AnswerSchema):
    """A chat completion."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageSchema


class ChatChunk(ChunkSchema):
    """The data of an event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
