"""Answers in OpenAI's JSON.

A stream's chunks differ in a few values only, so the constant parts are serialised once for each stream, not once for
each token.
"""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import Any

from pagestream.v1.inference_pb2 import Usage
from pagestream.v1.records_pb2 import API_FORM_CHAT_COMPLETIONS, ChoiceFinish, LogEnd, RequestSpec
from pagestream_streams.protocol.finish_reasons import finish_reason_name

from pagestream_gateway.api.openai.logprobs import LogprobsWriter
from pagestream_gateway.core.runs import Run


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class ChunkWriter:
    """Writes one request's runs as the `data` of OpenAI's stream events, and its whole answer as one body.

    A request that came over gRPC and is read over HTTP is shown as a completion.
    """

    def __init__(self, spec: RequestSpec) -> None:
        self._spec = spec
        self._is_chat = spec.answer.api == API_FORM_CHAT_COMPLETIONS
        self._logprobs = LogprobsWriter(spec)
        self.num_choices = len(spec.prompts) * max(1, spec.sampling.n)
        shared = {"created": spec.answer.created, "model": spec.model}
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._head = _compact({"id": spec.request_id, "object": name, **shared})[:-1] + ',"choices":['
        # With include_usage each chunk says that its usage is still to come.
        self._tail = '],"usage":null}' if spec.answer.include_usage else "]}"

    @property
    def needs_history(self) -> bool:
        """Whether a chunk depends on the text before it: completions' log probabilities tell where tokens stand."""
        return self._logprobs.is_asked and not self._is_chat

    def skip(self, run: Run) -> None:
        """Takes note of a run that the reader has already."""
        self._logprobs.write(run)

    def opening(self) -> str | None:
        """The chunk that stands before the first entry: the roles of a chat, the echoed prompts; None where there is
        none.
        """
        if self._is_chat:
            parts = ['"delta":{"role":"assistant","content":""}'] * self.num_choices
        elif self._spec.answer.echo_texts:
            parts = [f'"text":{encode_basestring_ascii(self._echo(number))}' for number in range(self.num_choices)]
        else:
            return None
        choices = [
            f'{{"index":{number},{part},"logprobs":null,"finish_reason":null}}' for number, part in enumerate(parts)
        ]
        return self._head + ",".join(choices) + self._tail

    def chunk(self, run: Run) -> str:
        """The chunk of a run that is not the log's end."""
        text = encode_basestring_ascii(run.text)
        if not self._is_chat:
            delta = f'"text":{text}'
        elif run.finish is not None and not run.text:
            delta = '"delta":{}'
        else:
            delta = f'"delta":{{"content":{text}}}'
        logprobs = "null"
        if self._logprobs.is_asked:
            logprobs = _compact(self._logprobs.write(run))
        finish = '"finish_reason":null' if run.finish is None else _finish_fields(run.finish)
        return f'{self._head}{{"index":{run.choice},{delta},"logprobs":{logprobs},{finish}}}{self._tail}'

    def usage(self, end: LogEnd) -> str | None:
        """The chunk with the usage, where it was asked for."""
        if not self._spec.answer.include_usage:
            return None
        return f'{self._head}],"usage":{_compact(usage_body(end.usage))}}}'

    def whole(self, choices: Sequence[Sequence[Run]], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed, from the runs of each choice."""
        return {
            "id": self._spec.request_id,
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": self._spec.answer.created,
            "model": self._spec.model,
            "choices": [self._choice(number, runs) for number, runs in enumerate(choices)],
            "usage": usage_body(usage),
        }

    def _choice(self, number: int, runs: Sequence[Run]) -> dict[str, Any]:
        text = "".join(run.text for run in runs)
        finish = next((run.finish for run in reversed(runs) if run.finish is not None), ChoiceFinish())
        said: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self._is_chat
            else {"text": self._echo(number) + text}
        )
        return {
            "index": number,
            **said,
            "logprobs": self._logprobs.whole(runs),
            "finish_reason": finish_reason_name(finish.reason) if finish.reason else None,
            "stop_reason": finish.stop_reason or None,
        }

    def _echo(self, choice: int) -> str:
        texts = self._spec.answer.echo_texts
        return texts[choice // max(1, self._spec.sampling.n)] if texts else ""


def _compact(body: dict[str, Any] | None) -> str:
    return json.dumps(body, separators=(",", ":"))


def _finish_fields(finish: ChoiceFinish) -> str:
    stop = encode_basestring_ascii(finish.stop_reason) if finish.stop_reason else "null"
    return f'"finish_reason":"{finish_reason_name(finish.reason)}","stop_reason":{stop}'
