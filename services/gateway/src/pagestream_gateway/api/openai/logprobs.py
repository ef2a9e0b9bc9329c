"""Log probabilities in OpenAI's two forms: the chat's list of tokens, and the four columns of completions."""

from collections.abc import Sequence
from typing import Any

from pagestream.v1.inference_pb2 import LogprobEntry, TokenLogprobs
from pagestream.v1.records_pb2 import API_FORM_CHAT_COMPLETIONS, RequestSpec

from pagestream_gateway.core.runs import Run

_LEAST = -9999.0  # JSON has no infinity; vLLM's stand-in


class LogprobsWriter:
    """Writes the log probabilities of one request's runs, in order: completions tell at which character of a choice
    each token stands.
    """

    def __init__(self, spec: RequestSpec) -> None:
        """`offsets` begin after the echoed prompt, as the text does."""
        self.is_asked = spec.sampling.HasField("logprobs")
        self._is_chat = spec.answer.api == API_FORM_CHAT_COMPLETIONS
        self._num_best = spec.answer.top_logprobs
        siblings = max(1, spec.sampling.n)
        echoes = [len(text) for text in spec.answer.echo_texts] or [0] * len(spec.prompts)
        self._offsets = [length for length in echoes for _ in range(siblings)]

    def write(self, run: Run) -> dict[str, Any] | None:
        """The `logprobs` of a run's chunk; None where they were not asked for or the run has no token."""
        offset = self._offsets[run.choice]
        # By the tokens' own texts: in the shown text a character may come with a later token, or not at all.
        self._offsets[run.choice] += sum(len(token.entries[0].text) for token in run.logprobs)
        if not self.is_asked or not run.logprobs:
            return None
        return self._chat(run.logprobs) if self._is_chat else self._columns(run.logprobs, offset)

    def whole(self, runs: Sequence[Run]) -> dict[str, Any] | None:
        """The `logprobs` of a choice that is shown at once."""
        written = [part for run in runs if (part := self.write(run)) is not None]
        if not self.is_asked:
            return None
        if self._is_chat:
            return {"content": [token for part in written for token in part["content"]], "refusal": None}
        names = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
        return {name: [value for part in written for value in part[name]] for name in names}

    def _chat(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = []
        for token in tokens:
            chosen, *best = token.entries
            tops = [_token(entry) for entry in best[: self._num_best]]
            content.append({**_token(chosen), "top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _columns(self, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        offsets, tops = [], []
        for token in tokens:
            chosen, *best = token.entries
            offsets.append(offset)
            offset += len(chosen.text)
            tops.append({entry.text: _finite(entry) for entry in (*best[: self._num_best], chosen)})
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(token.entries[0]) for token in tokens],
            "tokens": [token.entries[0].text for token in tokens],
            "top_logprobs": tops,
        }


def _token(entry: LogprobEntry) -> dict[str, Any]:
    return {"token": entry.text, "logprob": _finite(entry), "bytes": list(entry.text.encode())}


def _finite(entry: LogprobEntry) -> float:
    return max(entry.logprob, _LEAST)
