"""The content blocks of an answer, as the events that say how they grow."""

from typing import Any

from pagestream.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, RequestSpec
from pagestream_streams.protocol.records import finish_reason_name

from pagestream_gateway.api.anthropic.signatures import signature_of
from pagestream_gateway.api.openai.chat.parts import ChoiceReader
from pagestream_gateway.api.runs import Run
from pagestream_gateway.core.output.parts import Arguments, CallBegin, Content, Part, Reasoning

Event = dict[str, Any]
_KINDS = {Content: "text", Reasoning: "thinking", CallBegin: "tool_use", Arguments: "tool_use"}
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_INPUT_DELTA = "input_json_delta", "partial_json"
_EMPTY: dict[str, Event] = {"text": {"text": "", "citations": None}, "thinking": {"thinking": "", "signature": ""}}
"""Blocks without their text."""
_CALL: Event = {"id": "", "name": "", "input": {}, "caller": {"type": "direct"}}
"""Of a call, which the model itself makes: none comes from code that a server runs."""


class MessageOutput:
    """Divides the text of an answer into blocks. The events' concatenation does not depend on how runs cut the text."""

    def __init__(self, spec: RequestSpec) -> None:
        self.num_thinking_tokens = 0
        """Tokens before the first one of the answer, where there is reasoning: with its markers."""
        self._spec = spec
        self._reader = ChoiceReader(spec, 0, with_hidden=True)
        self._hidden: list[str] = []
        """Reasoning of the block that grows, where it is not shown."""
        self._num_tokens = 0
        self._is_answering = False
        self._index = -1
        self._open = ""
        """The type of the block that grows; "" where none does."""
        self._finish: ChoiceFinish | None = None

    def feed(self, run: Run) -> list[Event]:
        """Add a run that is not the log's end; return the events of what it shows."""
        events: list[Event] = []
        for part in self._reader.read(run.text, is_last=run.finish is not None):
            self._add(part, events)
        self._num_tokens += len(run.token_ids)
        if self._reader.has_reasoned and not self._is_answering:
            self.num_thinking_tokens = self._num_tokens
        if run.finish is not None:
            self._finish = run.finish
            self._close(events)
        return events

    def end(self) -> list[Event]:
        """Close a block that the log's end cut off; return the events."""
        events: list[Event] = []
        self._close(events)
        return events

    def stop(self, end: LogEnd) -> dict[str, str | None]:
        """Return why the answer ended: Anthropic's reasons, and those of the log that Anthropic has no word for.

        `stop_details` and `container` are null: they are of refusals and of tools that a server runs.
        """
        reason = end.reason if self._finish is None else self._finish.reason
        text = "" if self._finish is None else self._finish.stop_reason
        sequence = text if text and text in self._spec.sampling.stop else None
        if reason == FINISH_REASON_LENGTH:
            name = "max_tokens"
        elif reason != FINISH_REASON_STOP:
            name = finish_reason_name(reason)
        elif sequence is not None:
            name = "stop_sequence"  # also within a call, which is not complete then
        else:
            name = "tool_use" if self._reader.num_calls else "end_turn"
        return {"stop_reason": name, "stop_sequence": sequence, "stop_details": None, "container": None}

    def _add(self, part: Part, events: list[Event]) -> None:
        kind = _KINDS[type(part)]
        self._is_answering = self._is_answering or kind != "thinking"
        if isinstance(part, CallBegin):
            self._begin(kind, {**_CALL, "id": self._reader.call_id(), "name": part.name}, events)
            return
        if not part.text:
            return
        if self._open != kind:
            self._begin(kind, _EMPTY[kind], events)
        if isinstance(part, Reasoning) and self._spec.answer.output.hides_reasoning:
            self._hidden.append(part.text)
            return
        name, member = _DELTAS.get(kind, _INPUT_DELTA)
        delta = {"type": name, member: part.text}
        events.append({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _begin(self, kind: str, members: dict[str, Any], events: list[Event]) -> None:
        self._close(events)
        self._index += 1
        self._open = kind
        block = {"type": kind, **members}
        events.append({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close(self, events: list[Event]) -> None:
        if self._hidden:
            delta = {"type": "signature_delta", "signature": signature_of("".join(self._hidden))}
            events.append({"type": "content_block_delta", "index": self._index, "delta": delta})
            self._hidden.clear()
        if self._open:
            events.append({"type": "content_block_stop", "index": self._index})
        self._open = ""
