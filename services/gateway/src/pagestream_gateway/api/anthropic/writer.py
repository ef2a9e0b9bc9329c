"""The JSON of messages: the whole answer, and the events of a stream."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pagestream.v1.inference_pb2 import Usage
from pagestream.v1.records_pb2 import LogEnd, LogEntry, RequestSpec
from pydantic_core import from_json

from pagestream_gateway.api.anthropic.output import Event, MessageOutput
from pagestream_gateway.api.openai.position import START, Position, position_after
from pagestream_gateway.api.openai.writer import LogWriter
from pagestream_gateway.api.runs import Run, split_runs

_EMPTY_BYTES = 512  # of an answer without content


def message_body(spec: RequestSpec) -> dict[str, Any]:
    """Return an answer as it is before its first token: how much of its prompt is cached is not known then."""
    usage = Usage(prompt_tokens=sum(len(prompt.ids) for prompt in spec.prompts))
    return {
        "id": spec.request_id,
        "type": "message",
        "role": "assistant",
        "model": spec.adapter.name or spec.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": _message_usage(usage),
    }


class MessageWriter(LogWriter):
    """Writes the events of a run as lines of JSON; the last one has the position after the run."""

    needs_history = True

    def __init__(self, spec: RequestSpec) -> None:
        super().__init__(spec)
        self._output = MessageOutput(spec)

    def split(self, first_index: int, entries: Sequence[LogEntry]) -> list[Run]:
        """Return a run for each entry where tokens of reasoning are counted, whatever came together."""
        if not self.spec.answer.output.reasoning_format:
            return super().split(first_index, entries)
        return [run for index, entry in enumerate(entries, first_index) for run in split_runs(index, [entry])]

    def skip(self, run: Run) -> None:
        if run.end is None:
            self._output.feed(run)

    def opening(self) -> str | None:
        return self._lines([{"type": "message_start", "message": message_body(self.spec)}], START)

    def chunk(self, run: Run) -> str | None:
        return self._lines(self._output.feed(run), position_after(run))

    def usage(self, end: LogEnd, position: Position) -> str | None:
        delta = {"type": "message_delta", "delta": self._output.stop(end), "usage": self._usage(end)}
        return self._lines([*self._output.end(), delta, {"type": "message_stop"}], position)

    def _usage(self, end: LogEnd) -> dict[str, Any]:
        return _usage(end.usage, self._output.num_thinking_tokens)

    def _lines(self, events: Sequence[Event], position: Position) -> str | None:
        if not events:
            return None
        *others, last = events
        place = {"stream_position": position.event_id(self.spec.request_id)}
        return "\n".join(json.dumps(event, separators=(",", ":")) for event in (*others, {**last, **place}))


class WholeMessage:
    """Collects an answer that is not streamed; see AnswerBody."""

    def __init__(self, writer: MessageWriter) -> None:
        self._spec = writer.spec
        self._output = MessageOutput(writer.spec)
        self._blocks: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        """Of the last block."""
        self.num_bytes = self.empty_bytes(writer)

    @staticmethod
    def empty_bytes(writer: MessageWriter) -> int:
        """Return the bytes of an answer without content."""
        return _EMPTY_BYTES

    @staticmethod
    def size_of(writer: MessageWriter, run: Run) -> int:
        """Return the bytes of a run's text."""
        return len(run.text.encode())

    def set_fingerprint(self, fingerprint: str) -> None:
        """Do nothing: a message has no place for it."""

    def add(self, run: Run) -> None:
        """Add a run that is not the log's end."""
        self._take(self._output.feed(run))
        self.num_bytes += len(run.text.encode())

    def parts(self, end: LogEnd) -> Iterator[bytes]:
        """Yield the body."""
        self._take(self._output.end())
        usage = _message_usage(end.usage, self._output.num_thinking_tokens)
        body = {**message_body(self._spec), **self._output.stop(end), "usage": usage}
        del body["content"]
        yield json.dumps(body, separators=(",", ":"))[:-1].encode() + b',"content":['
        for number, block in enumerate(self._blocks):
            yield (b"," if number else b"") + json.dumps(block, ensure_ascii=False, separators=(",", ":")).encode()
        yield b"]}"

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            match event["type"]:
                case "content_block_start":
                    self._blocks.append(event["content_block"])
                case "content_block_delta" if event["delta"]["type"] == "signature_delta":
                    self._blocks[-1]["signature"] = event["delta"]["signature"]
                case "content_block_delta":
                    _, text = event["delta"].values()
                    self._pieces.append(text)
                case "content_block_stop":
                    self._close("".join(self._pieces))
                    self._pieces.clear()

    def _close(self, text: str) -> None:
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _input(text)
        else:
            block[block["type"]] = text


def _input(text: str) -> dict[str, Any]:
    """Return the arguments of a call as far as they go, as the official client does with a stream's."""
    try:
        value = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _message_usage(usage: Usage, num_thinking_tokens: int = 0) -> dict[str, Any]:
    return {
        **_usage(usage, num_thinking_tokens),
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "inference_geo": None,
        "service_tier": "standard",
    }


def _usage(usage: Usage, num_thinking_tokens: int) -> dict[str, Any]:
    """Return Anthropic's usage, whose input_tokens are without those that were read from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": num_thinking_tokens},
        "server_tool_use": None,
    }
