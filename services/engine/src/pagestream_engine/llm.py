"""Offline inference: prompts in, finished outputs out. Names as vLLM's, so that a user changes one import."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from tokenizers import Tokenizer

from pagestream_engine.config import EngineConfig, EngineOptions
from pagestream_engine.engine import Engine
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.executor.base import RunnerFactory, make_model_runner
from pagestream_engine.pooling.config import read_pooling
from pagestream_engine.pooling.vectors import probabilities_of, vector_of
from pagestream_engine.progress_line import ProgressLine
from pagestream_engine.request.adapter import Adapter, LoRARequest
from pagestream_engine.request.outputs import (
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    RequestOutput,
    StepOutput,
    TokenLogprob,
)
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import Sibling

Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or vLLM's dictionaries `{"prompt": ...}` and `{"prompt_token_ids": ...}`."""


class LLM:
    """A model and an engine for it, in this process.

    Args:
        model: a model folder, or the name of a Hugging Face repository.
        options: vLLM's engine options (`EngineOptions`). `num_gpu_blocks_override` and `block_size` hold on a CPU too,
            where the pool is in host memory.

    Raises:
        ModelNotFound: there is no such model.
        ConfigError: an option is unknown, malformed, or does not fit the model; `.field` names it.
    """

    def __init__(
        self, model: str | Path, *, make_runner: RunnerFactory = make_model_runner, **options: Unpack[EngineOptions]
    ) -> None:
        self.engine = Engine(model, EngineConfig.from_options(options), make_runner=make_runner)
        self._num_requests = 0

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where its folder has none."""
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, all together.

        Args:
            prompts: one prompt or a list of them.
            sampling_params: for all prompts, or one for each; None is `SamplingParams()`.
            use_tqdm: whether to show progress on stderr, where that is a terminal.
            lora_request: the adapter of all prompts, or one, or None, for each; needs `enable_lora`.

        Returns:
            One output for each prompt, in order. A choice that failed has finish_reason "error"; the others go on.

        Raises:
            InvalidRequest: a prompt or its parameters can't be run (a `ValueError`). Nothing has been run then.
            AdapterError: an adapter can't be used (a `ValueError`), likewise.
        """
        requests = self._make_requests(_as_list(prompts), sampling_params, lora_request)
        progress = ProgressLine(len(requests), enabled=use_tqdm)
        try:
            for request in requests:
                request.add_to(self.engine)
            self._run({seq_id: request for request in requests for seq_id in request.choices}, progress)
        finally:
            for request in requests:
                request.abort_in(self.engine)
            progress.close()
        return [request.output for request in requests]

    def _run(self, requests: dict[str, _Request], progress: ProgressLine) -> None:
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            finished = 0
            for output in outputs:
                request = requests.get(output.seq_id)
                if request is not None:
                    finished += request.take(output)
            progress.note(tokens=len(outputs), finished=finished)

    def _make_requests(
        self,
        prompts: list[Prompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[_Request]:
        params = _params_for(len(prompts), given)
        take = self.engine.adapters.take
        wanted = _adapters_for(len(prompts), lora_request)
        adapters = [None if each is None else take(each) for each in wanted]
        texts, token_ids = zip(*map(self._parse, prompts), strict=True) if prompts else ((), ())
        encoded = iter(self._encode([text for text in texts if text is not None]))
        requests = []
        for text, ids, param, adapter in zip(texts, token_ids, params, adapters, strict=True):
            prompt_ids = next(encoded) if ids is None else ids
            requests.append(_Request.make(str(self._num_requests), text, prompt_ids, param, adapter))
            self._num_requests += 1
        return requests

    def embed(self, prompts: Prompt | Sequence[Prompt], *, dimensions: int = 0) -> list[EmbeddingOutput]:
        """Return the vectors of prompts, pooled as the model's files say.

        Args:
            prompts: as for `generate`.
            dimensions: leading numbers that are kept, of models whose files say that they may be; 0: all.

        Raises:
            InvalidRequest: names what is wrong.
        """
        pooling = read_pooling(self.engine.folder)
        if pooling.unsupported:
            raise InvalidRequest(f"pooling: {pooling.unsupported}, which is not supported")
        if dimensions and not pooling.allows(dimensions, self.engine.pooled_size):
            raise InvalidRequest(f"dimensions: given {dimensions}, expected 0 or a number that the model's files allow")
        embeddings = []
        for output, pooled in self._pool(prompts, pooling.kind):
            vector = vector_of(pooled, dimensions=dimensions, normalize=pooling.normalize)
            embeddings.append(
                EmbeddingOutput(output.request_id, output.prompt_token_ids, vector.tolist(), output.num_cached_tokens)
            )
        return embeddings

    def classify(self, prompts: Prompt | Sequence[Prompt]) -> list[ClassificationOutput]:
        """Return the probabilities of prompts' labels, by a model whose last matrix makes scores of labels.

        Args:
            prompts: as for `generate`.

        Raises:
            InvalidRequest: names what is wrong.
        """
        pooling = read_pooling(self.engine.folder)
        if not pooling.labels:
            raise InvalidRequest("classify: given a model without labels, expected one ForSequenceClassification")
        return [
            ClassificationOutput(
                output.request_id,
                output.prompt_token_ids,
                probabilities_of(pooled, pooling.activation).tolist(),
                output.num_cached_tokens,
            )
            for output, pooled in self._pool(prompts, pooling.kind)
        ]

    def _pool(self, prompts: Prompt | Sequence[Prompt], kind: str) -> list[tuple[RequestOutput, bytes]]:
        """Return outputs with what is pooled of their prompts."""
        params = SamplingParams(max_tokens=0, temperature=0.0, pooling=kind)
        pooled = []
        for output in self.generate(prompts, params, use_tqdm=False):
            if output.pooled is None:
                raise InvalidRequest(f"prompt: {output.outputs[0].error}")
            pooled.append((output, output.pooled))
        return pooled

    def sleep(self, level: int = 1) -> None:
        """Release the KV cache and what steps work with; a GPU's weights go to host memory. See `Sleep.begin`."""
        self.engine.sleep.begin(level)

    def wake_up(self) -> None:
        """Take that memory again: prompts can be run. See `Sleep.end`."""
        self.engine.sleep.end()

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        if self.engine.tokenizer is None:
            raise InvalidRequest(
                "prompt: given text, expected prompt_token_ids; text needs a tokenizer.json in the model folder"
            )
        return [encoding.ids for encoding in self.engine.tokenizer.encode_batch(texts)]

    def _parse(self, prompt: Prompt) -> tuple[str | None, list[int] | None]:
        """The text to encode, or the token ids."""
        if isinstance(prompt, str):
            return prompt, None
        if isinstance(prompt, Mapping):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
            if not unknown and isinstance(ids, (list, tuple)):
                return None, list(ids)
            if not unknown and ids is None and isinstance(text, str):
                return text, None
        elif isinstance(prompt, (list, tuple)):
            return None, list(prompt)
        raise InvalidRequest(
            f"prompt: given {prompt!r:.80}, expected a string, token ids, {{'prompt': str}} or "
            "{'prompt_token_ids': list of int}"
        )


@dataclass
class _Request:
    """One prompt on its way: its output and its choices, which are sequences of their own."""

    output: RequestOutput
    params: SamplingParams
    choices: dict[str, CompletionOutput]
    adapter: Adapter | None = None
    texts: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def make(
        cls, request_id: str, text: str | None, token_ids: list[int], params: SamplingParams, adapter: Adapter | None
    ) -> _Request:
        outputs = [CompletionOutput(index) for index in range(params.n)]
        output = RequestOutput(request_id, text, token_ids, outputs, finished=False)
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        return cls(output, params, {f"{request_id}/{choice.index}": choice for choice in outputs}, adapter)

    def add_to(self, engine: Engine) -> None:
        params = self.params
        seed = engine.draw_seed() if params.seed is None else params.seed
        siblings = [Sibling(seq_id, params.for_child(seed, choice.index)) for seq_id, choice in self.choices.items()]
        self.texts = {seq_id: [] for seq_id in self.choices}
        engine.add_group(self.output.prompt_token_ids, siblings, adapter=self.adapter)

    def abort_in(self, engine: Engine) -> None:
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


def _take_logprobs(choice: CompletionOutput, tokens: Sequence[TokenLogprob]) -> None:
    choice.logprobs = choice.logprobs or []
    choice.logprobs.append(_by_token_id(tokens))
    choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + tokens[0].logprob


def _by_token_id(tokens: Sequence[TokenLogprob]) -> dict[int, Logprob]:
    return {token.token_id: Logprob(token.logprob, token.rank, token.text) for token in tokens}


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a list of token ids is one prompt."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def _params_for(num_prompts: int, given: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * num_prompts
    if not isinstance(given, Sequence) or not all(isinstance(each, SamplingParams) for each in given):
        raise InvalidRequest(f"sampling_params: given {given!r:.80}, expected SamplingParams, or a list of them")
    if len(given) != num_prompts:
        raise InvalidRequest(
            f"sampling_params: given {len(given)}, expected one, or one for each of {num_prompts} prompts"
        )
    return list(given)


def _adapters_for(
    num_prompts: int, given: LoRARequest | Sequence[LoRARequest | None] | None
) -> Sequence[LoRARequest | None]:
    if given is None or isinstance(given, LoRARequest):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise InvalidRequest(
            f"lora_request: given {len(given)}, expected one, or one for each of {num_prompts} prompts"
        )
    return given
