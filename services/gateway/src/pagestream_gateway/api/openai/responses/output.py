"""The output items of a response, and the events that say how they grow."""

from typing import Any

from pagestream.v1.inference_pb2 import FINISH_REASON_STOP
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_gateway.api.openai.chat.parts import ChoiceReader
from pagestream_gateway.api.openai.logprobs import ChatLogprobs, Logprobs
from pagestream_gateway.api.runs import Run
from pagestream_gateway.core.output.parts import Arguments, CallBegin, Content, Part, Reasoning

Event = dict[str, Any]
Item = dict[str, Any]
ITEM_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
"""What the ids of items begin with, by their type."""
_DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


def item_id(prefix: str, response_id: str, number: int) -> str:
    """Return the id of an item, which names its response: a reference to it needs no index."""
    return f"{prefix}_{response_id}_{number}"


_LOGPROB_BYTES = 512  # of one token's log probability, as objects in memory


def run_bytes(run: Run, *, with_logprobs: bool) -> int:
    """Return about how many bytes a run takes in an output."""
    num_logprobs = sum(len(token.entries) for token in run.logprobs) if with_logprobs else 0
    return len(run.text.encode()) + _LOGPROB_BYTES * num_logprobs


class ResponseOutput:
    """Divides a response's text into items. Events depend on how runs cut the text: give it one entry at a time.

    A delta of text has the log probabilities of all tokens since the one before, where they were asked for.
    """

    def __init__(self, spec: RequestSpec, logprobs: Logprobs | None = None) -> None:
        """`logprobs`: writes those of runs; None: none are shown."""
        self.items: list[Item] = []
        """The last one lacks its text while it grows."""
        self.num_reasoning_tokens = 0
        """Tokens before the first one of the answer, where there is reasoning: with its markers."""
        self.num_bytes = 0
        """Of the items, about."""
        self._request_id = spec.request_id
        self._logprobs = logprobs or ChatLogprobs(RequestSpec())
        self._fresh: list[Any] = []
        """Log probabilities that no delta has shown."""
        self._num_earlier = 0
        """How many of these are of earlier runs."""
        self._shown: list[Any] = []
        """Those of the text that grows."""
        self._reader = ChoiceReader(spec, 0)
        self._pieces: list[str] | None = None
        self._num_tokens = 0
        self._is_answering = False

    def feed(self, run: Run) -> list[Event]:
        """Add a run; return the events of what it shows, without their numbers."""
        events: list[Event] = []
        self.num_bytes += run_bytes(run, with_logprobs=self._logprobs.is_asked)
        self._num_earlier = len(self._fresh)
        self._fresh += self._logprobs.lists(self._logprobs.write(run)).get("content", ())
        for part in self._reader.read(run.text, is_last=run.finish is not None):
            self._add(part, events)
        self._num_tokens += len(run.token_ids)
        is_reasoning = self._reader.has_reasoned and not self._is_answering
        if is_reasoning:
            self.num_reasoning_tokens = self._num_tokens
        if is_reasoning or (self.items and self.items[-1]["type"] == "function_call"):
            self._fresh = []
        if run.finish is not None:
            self._close(events, is_complete=run.finish.reason == FINISH_REASON_STOP)
        return events

    def end(self) -> list[Event]:
        """Close an item that the log's end cut off; return the events."""
        events: list[Event] = []
        self._close(events, is_complete=False)
        return events

    def _add(self, part: Part, events: list[Event]) -> None:
        kind = {Reasoning: "reasoning", Content: "message"}.get(type(part), "function_call")
        self._is_answering = self._is_answering or kind != "reasoning"
        if isinstance(part, CallBegin) or self._pieces is None or self.items[-1]["type"] != kind:
            self._close(events, is_complete=True)
            self._open(kind, part.name if isinstance(part, CallBegin) else "", events)
        if isinstance(part, Reasoning | Content | Arguments) and self._pieces is not None and part.text:
            self._pieces.append(part.text)
            delta = {"type": f"{_DELTAS[kind]}.delta", **self._place(), "delta": part.text}
            events.append({**delta, "logprobs": self._taken()} if kind == "message" else delta)
        if kind != "message":  # what follows in this run may be text
            del self._fresh[: self._num_earlier]
            self._num_earlier = 0

    def _open(self, kind: str, name: str, events: list[Event]) -> None:
        name_of_item = item_id(ITEM_PREFIXES[kind], self._request_id, len(self.items))
        item: Item = {"id": name_of_item, "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": self._reader.call_id(), "name": name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self.items.append(item)
        self._pieces, self._shown = [], []
        events.append({"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)})
        if kind != "function_call":
            events.append({"type": "response.content_part.added", **self._place(), "part": self._part("")})

    def _close(self, events: list[Event], *, is_complete: bool) -> None:
        if self._pieces is None:
            return
        text, self._pieces, item = "".join(self._pieces), None, self.items[-1]
        if item["type"] == "message":
            self._taken()
        done = {"type": f"{_DELTAS[item['type']]}.done", **self._place()}
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append({**done, "name": item["name"], "arguments": text})
        else:
            part = self._part(text)
            item["content"] = [part]
            events.append({**done, "text": text, **self._all_logprobs()})
            events.append({"type": "response.content_part.done", **self._place(), "part": part})
        item["status"] = "completed" if is_complete else "incomplete"
        events.append({"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item})

    def _place(self) -> Event:
        item = self.items[-1]
        in_item = {} if item["type"] == "function_call" else {"content_index": 0}
        return {"item_id": item["id"], "output_index": len(self.items) - 1, **in_item}

    def _taken(self) -> list[Any]:
        """Return the log probabilities that no delta has shown, and count them to the text."""
        taken, self._fresh, self._num_earlier = self._fresh, [], 0
        self._shown += taken
        return taken

    def _all_logprobs(self) -> Event:
        return {"logprobs": self._shown} if self.items[-1]["type"] == "message" else {}

    def _part(self, text: str) -> Item:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._shown}
