"""One prompt on its way through an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pagestream_engine.engine import Engine
from pagestream_engine.offline.outputs import CompletionOutput, Logprob, RequestOutput
from pagestream_engine.offline.prompts import EncodedPrompt
from pagestream_engine.request import Adapter, LoRARequest, Request, Sibling, StepOutput, TokenLogprob
from pagestream_engine.sampling_params import SamplingParams


@dataclass
class OfflineRequest:
    """A prompt, its output, and its choices, which are sequences of their own."""

    output: RequestOutput
    params: SamplingParams
    choices: dict[str, CompletionOutput]
    """By the engine's id of the sequence."""
    adapter: Adapter | None = None
    priority: int = 0
    cache_salt: bytes = b""
    texts: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def make(
        cls,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        *,
        adapter: Adapter | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> OfflineRequest:
        """Make the request of a prompt, which is not yet the engine's."""
        outputs = [CompletionOutput(index, lora_request=lora_request) for index in range(params.n)]
        output = RequestOutput(request_id, prompt.text, prompt.token_ids, outputs, False, lora_request=lora_request)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        choices = {f"{request_id}/{choice.index}": choice for choice in outputs}
        return cls(output, params, choices, adapter, priority, prompt.cache_salt)

    def add_to(self, engine: Engine) -> None:
        """Queue the choices; raises as `Engine.add`."""
        params = self.params
        seed = engine.draw_seed() if params.seed is None else params.seed
        siblings = [Sibling(seq_id, params.for_child(seed, choice.index)) for seq_id, choice in self.choices.items()]
        self.texts = {seq_id: [] for seq_id in self.choices}
        engine.add(
            Request(
                self.output.prompt_token_ids,
                siblings,
                priority=self.priority,
                cache_salt=self.cache_salt,
                adapter=self.adapter,
            )
        )

    def abort_in(self, engine: Engine) -> None:
        """End the choices that go on."""
        for seq_id, choice in self.choices.items():
            if choice.finish_reason is None:
                engine.abort_request(seq_id)

    def take(self, step: StepOutput) -> bool:
        """Take what a step brought. Return whether all choices have ended with it."""
        choice = self.choices[step.seq_id]
        if step.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None, *map(_by_token_id, step.prompt_logprobs)]
        if step.pooled is not None:
            self.output.pooled = step.pooled
        if step.token_id is not None:
            choice.token_ids.append(step.token_id)
        if step.logprobs is not None:
            _take_logprobs(choice, step.logprobs)
        self.texts[step.seq_id].append(step.text)
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, step.num_cached_tokens)
        if step.finish_reason is None:
            return False
        choice.text = "".join(self.texts[step.seq_id])
        if step.cumulative_logprob is not None:
            choice.cumulative_logprob = step.cumulative_logprob
        choice.finish_reason, choice.stop_reason, choice.error = step.finish_reason, step.stop_reason, step.error
        self.output.finished = all(other.finish_reason is not None for other in self.choices.values())
        return self.output.finished

    def snapshot(self) -> RequestOutput:
        """Return a copy of the output so far, which later steps leave as it is."""
        outputs = [
            replace(choice, token_ids=list(choice.token_ids), text="".join(self.texts[seq_id]))
            for seq_id, choice in self.choices.items()
        ]
        return replace(self.output, outputs=outputs)


def _take_logprobs(choice: CompletionOutput, tokens: Sequence[TokenLogprob]) -> None:
    choice.logprobs = choice.logprobs or []
    choice.logprobs.append(_by_token_id(tokens))
    choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + tokens[0].logprob


def _by_token_id(tokens: Sequence[TokenLogprob]) -> dict[int, Logprob]:
    return {token.token_id: Logprob(token.logprob, token.rank, token.text) for token in tokens}
