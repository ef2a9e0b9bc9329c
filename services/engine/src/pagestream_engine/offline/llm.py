"""Offline inference: prompts in, finished outputs out. Names as vLLM's, so that a user changes one import."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any, TextIO, Unpack

from tokenizers import Tokenizer

from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.executor.base import RunnerFactory, make_model_runner
from pagestream_engine.models.defaults import read_generation_config, sampling_defaults
from pagestream_engine.models.pooling import PoolingConfig, read_pooling
from pagestream_engine.offline import pooling
from pagestream_engine.offline.llm_engine import LLMEngine, Metric, metrics_of
from pagestream_engine.offline.options import VllmOptions, translate
from pagestream_engine.offline.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    OfflineRequest,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from pagestream_engine.offline.prompts import (
    ChatTemplate,
    EncodedPrompt,
    Message,
    Prompt,
    as_conversations,
    as_list,
    encode_prompts,
    one_for_each,
)
from pagestream_engine.request import LoRARequest
from pagestream_engine.sampling_params import BeamSearchParams, PoolingParams, SamplingParams

UseTqdm = bool | Callable[..., Any]
"""Whether to show progress; vLLM's takes a class of a progress bar too, which counts as yes."""
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapter of all prompts, or one, or None, for each; needs `enable_lora`."""


class LLM:
    """A model and an engine for it, in this process.

    Args:
        model: a model folder, or the name of a Hugging Face repository.
        options: vLLM's engine options (`VllmOptions`). `num_gpu_blocks_override` and `block_size` hold on a CPU too,
            where the pool is in host memory.

    Raises:
        ModelNotFound: there is no such model.
        ConfigError: an option is unknown, malformed, or does not fit the model; `.field` names it.
    """

    def __init__(
        self, model: str | Path, *, make_runner: RunnerFactory = make_model_runner, **options: Unpack[VllmOptions]
    ) -> None:
        model, own = translate(model, options)
        self.engine = Engine(model, EngineConfig.from_options(own), make_runner=make_runner)
        self._num_requests = 0

    @cached_property
    def llm_engine(self) -> LLMEngine:
        """The engine, to be stepped by hand while nothing else runs."""
        return LLMEngine(self.engine)

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None where its folder has none."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generate` takes without parameters: vLLM's defaults, and before them the model's own, of its
        `generation_config.json`.
        """
        return SamplingParams(**sampling_defaults(read_generation_config(self.engine.folder)))  # type: ignore[arg-type]

    def get_metrics(self) -> list[Metric]:
        """Return the engine's counts under vLLM's names."""
        return metrics_of(self.engine.stats())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end, all together.

        Args:
            prompts: one prompt or a list of them.
            sampling_params: for all prompts, or one for each; None is `get_default_sampling_params()`.
            use_tqdm: whether to show progress on stderr, where that is a terminal.
            lora_request: see `Adapters`.
            priority: the class of each prompt, 0 first, for policies that look at it.

        Returns:
            One output for each prompt, in order. A choice that failed has finish_reason "error"; the others go on.

        Raises:
            InvalidRequest: a prompt or its parameters can't be run (a `ValueError`). Nothing has been run then.
            AdapterError: an adapter can't be used (a `ValueError`), likewise.
        """
        given = as_list(prompts)
        params = self._params_for(len(given), sampling_params)
        return self._run(self._encode(given), params, use_tqdm, lora_request, priority)

    def chat(  # noqa: PLR0917 - vLLM's order
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Adapters = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Run conversations to the end of the next message.

        Args:
            messages: one conversation, or a list of them; the content of a message is a string, or parts of text.
            sampling_params: as for `generate`, as are `use_tqdm` and `lora_request`.
            use_tqdm: see above.
            lora_request: see above.
            chat_template: a Jinja template in place of the model's own.
            chat_template_content_format: not read: a template gets what it takes, as in `auto`.
            add_generation_prompt: whether the prompt ends with what begins an answer.
            continue_final_message: whether the answer goes on with the last message; without `add_generation_prompt`.
            tools: functions that the template shows to the model.
            chat_template_kwargs: further variables of the template.
            mm_processor_kwargs: not read: models are of text alone.

        Returns:
            As `generate`; `prompt` is the text that the template has made.

        Raises:
            InvalidRequest: as `generate`, or the messages can't be rendered.
        """
        del chat_template_content_format, mm_processor_kwargs
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest("continue_final_message: given True, expected add_generation_prompt=False beside it")
        conversations = as_conversations(messages)
        params = self._params_for(len(conversations), sampling_params)
        options: dict[str, Any] = {
            **(chat_template_kwargs or {}),
            "template": chat_template,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        texts: list[Prompt] = [self._chat_template.render(each, **options) for each in conversations]
        return self._run(self._encode(texts, add_special_tokens=False), params, use_tqdm, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: Adapters = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest outputs of prompts.

        Args:
            prompts: as for `generate`.
            params: for all prompts.
            lora_request: see `Adapters`.
            use_tqdm: whether to show progress on stderr, where that is a terminal.
            concurrency_limit: not read: the engine runs as many at once as it has room for.

        Returns:
            One output for each prompt, in order, whose sequences are the best `beam_width`, the best one first.

        Raises:
            InvalidRequest: a prompt or its parameters can't be run, or have failed (a `ValueError`).
        """
        del concurrency_limit
        given = as_list(prompts)
        wanted = [params.sampling_params()] * len(given)
        outputs = self._run(self._encode(given), wanted, use_tqdm, lora_request)
        return [
            BeamSearchOutput([self._beam(output, index) for index in range(params.beam_width)]) for output in outputs
        ]

    def _beam(self, output: RequestOutput, index: int) -> BeamSearchSequence:
        choice = output.outputs[index]
        if choice.error is not None:
            raise InvalidRequest(f"prompt: {choice.error}")
        tokens = [*output.prompt_token_ids, *choice.token_ids]
        return BeamSearchSequence(
            tokens,
            choice.logprobs or [],
            choice.lora_request,
            choice.cumulative_logprob or 0.0,
            None if self.engine.tokenizer is None else self.engine.tokenizer.decode(tokens),
            choice.finish_reason,
            choice.stop_reason,
        )

    # -- prompts without an output ------------------------------------------------------------------------------------

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int = 0,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vectors of prompts, pooled as the model's files say.

        Args:
            prompts: as for `generate`.
            dimensions: leading numbers that are kept, of models whose files say that they may be; 0: all.
            truncate_prompt_tokens: see `PoolingParams`.
            use_tqdm: whether to show progress on stderr, where that is a terminal.
            pooling_params: for all prompts; the two arguments above go before them.
            lora_request: see `Adapters`.

        Raises:
            InvalidRequest: names what is wrong.
        """
        params = _merged(pooling_params, dimensions=dimensions or None, truncate_prompt_tokens=truncate_prompt_tokens)
        found = self._pooling
        pooling.check_vectors(found, params, self.engine.pooled_size)
        pooled = self._pool(self._encode(as_list(prompts)), found.kind, params, use_tqdm, lora_request)
        return pooling.embeddings_of(pooled, found, params)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Adapters = None,
    ) -> list[ClassificationRequestOutput]:
        """Return the probabilities of prompts' labels, by a model whose last matrix makes scores of labels.

        Args:
            prompts: as for `generate`.
            truncate_prompt_tokens: see `PoolingParams`.
            use_tqdm: whether to show progress on stderr, where that is a terminal.
            pooling_params: for all prompts.
            lora_request: see `Adapters`.

        Raises:
            InvalidRequest: names what is wrong.
        """
        params = _merged(pooling_params, truncate_prompt_tokens=truncate_prompt_tokens)
        found = self._pooling
        pooling.check_labels(found)
        pooled = self._pool(self._encode(as_list(prompts)), found.kind, params, use_tqdm, lora_request)
        return pooling.labels_of(pooled, found, params)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Adapters = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts go together: 1 with each of N, or N with N.

        A model with one label reads both texts of a pair at once; of others the vectors are compared.

        Args:
            data_1: a query, or one for each document.
            data_2: the documents.
            truncate_prompt_tokens: see `PoolingParams`.
            use_tqdm: whether to show progress on stderr, where that is a terminal.
            pooling_params: for all pairs.
            lora_request: see `Adapters`.

        Raises:
            InvalidRequest: names what is wrong.
        """
        pairs = _pairs(data_1, data_2)
        params = _merged(pooling_params, truncate_prompt_tokens=truncate_prompt_tokens)
        found = self._pooling
        if not found.labels:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            vectors = self.embed(texts, use_tqdm=use_tqdm, pooling_params=params, lora_request=lora_request)
            by_text = dict(zip(texts, vectors, strict=True))
            return pooling.similarities([(by_text[one], by_text[other]) for one, other in pairs])
        if len(found.labels) != 1:
            raise InvalidRequest(
                f"score: given a model with {len(found.labels)} labels, expected one with one, or none"
            )
        pooled = self._pool(
            pooling.pair_prompts(pairs, self.engine.tokenizer, found, self._chat_template),
            found.kind,
            params,
            use_tqdm,
            lora_request,
        )
        return pooling.scores_of_pairs(pooling.labels_of(pooled, found, params))

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: Adapters = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return what is pooled of prompts, as tensors.

        Args:
            prompts: as for `generate`.
            pooling_params: for all prompts.
            truncate_prompt_tokens: see `PoolingParams`.
            use_tqdm: whether to show progress on stderr, where that is a terminal.
            lora_request: see `Adapters`.
            pooling_task: embed or classify; None: what the model does.

        Raises:
            InvalidRequest: names what is wrong.
        """
        import torch

        params = _merged(pooling_params, truncate_prompt_tokens=truncate_prompt_tokens)
        task = pooling_task or params.task or ("classify" if self._pooling.labels else "embed")
        options = {"use_tqdm": use_tqdm, "pooling_params": params, "lora_request": lora_request}
        if task == "embed":
            vectors = self.embed(prompts, **options)  # type: ignore[arg-type]
            found = [(each, each.outputs.embedding) for each in vectors]
        elif task == "classify":
            labelled = self.classify(prompts, **options)  # type: ignore[arg-type]
            found = [(each, each.outputs.probs) for each in labelled]  # type: ignore[misc]
        else:
            raise InvalidRequest(f"pooling_task: given {task!r:.80}, expected embed or classify")
        return [
            PoolingRequestOutput(
                each.request_id, PoolingOutput(torch.tensor(data)), each.prompt_token_ids, each.num_cached_tokens
            )
            for each, data in found
        ]

    # -- memory -------------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Release the KV cache and what steps work with; a GPU's weights go to host memory. See `Sleep.begin`."""
        self.engine.sleep.begin(level)

    def wake_up(self) -> None:
        """Take that memory again: prompts can be run. See `Sleep.end`."""
        self.engine.sleep.end()

    # -- running ------------------------------------------------------------------------------------------------------

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.engine.folder)

    @property
    def _pooling(self) -> PoolingConfig:
        return read_pooling(self.engine.folder)

    def _encode(self, prompts: Sequence[Prompt], *, add_special_tokens: bool = True) -> list[EncodedPrompt]:
        return encode_prompts(prompts, self.engine.tokenizer, add_special_tokens=add_special_tokens)

    def _params_for(
        self, num_prompts: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        params = self.get_default_sampling_params() if given is None else given
        return one_for_each("sampling_params", num_prompts, params, SamplingParams)

    def _pool(
        self,
        prompts: list[EncodedPrompt],
        kind: str,
        given: PoolingParams,
        use_tqdm: UseTqdm,
        lora_request: Adapters,
    ) -> list[tuple[RequestOutput, bytes]]:
        """Return outputs with what is pooled of their prompts."""
        prompts = [self._cut(prompt, given.truncate_prompt_tokens) for prompt in prompts]
        params = [SamplingParams(max_tokens=0, temperature=0.0, pooling=kind)] * len(prompts)
        pooled = []
        for output in self._run(prompts, params, use_tqdm, lora_request):
            if output.pooled is None:
                raise InvalidRequest(f"prompt: {output.outputs[0].error}")
            pooled.append((output, output.pooled))
        return pooled

    def _cut(self, prompt: EncodedPrompt, most: int | None) -> EncodedPrompt:
        """Keep the last tokens of a prompt."""
        if most is None:
            return prompt
        most = self.engine.max_model_len - 1 if most < 0 else most
        return prompt._replace(token_ids=prompt.token_ids[-most:] if most else [])

    def _run(
        self,
        prompts: list[EncodedPrompt],
        params: list[SamplingParams],
        use_tqdm: UseTqdm,
        lora_request: Adapters = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        requests = self._make_requests(prompts, params, lora_request, priority)
        progress = ProgressLine(len(requests), enabled=bool(use_tqdm))
        try:
            for request in requests:
                request.add_to(self.engine)
            self._step({seq_id: request for request in requests for seq_id in request.choices}, progress)
        finally:
            for request in requests:
                request.abort_in(self.engine)
            progress.close()
        return [request.output for request in requests]

    def _step(self, requests: dict[str, OfflineRequest], progress: ProgressLine) -> None:
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
        prompts: list[EncodedPrompt],
        params: list[SamplingParams],
        lora_request: Adapters,
        priority: Sequence[int] | None,
    ) -> list[OfflineRequest]:
        count = len(params)
        wanted = one_for_each("lora_request", count, lora_request, LoRARequest | None)  # type: ignore[arg-type]
        classes = [0] * count if priority is None else one_for_each("priority", count, priority, int)
        take = self.engine.adapters.take
        adapters = [None if each is None else take(each) for each in wanted]
        requests = []
        for prompt, param, adapter, given, rank in zip(prompts, params, adapters, wanted, classes, strict=True):
            requests.append(
                OfflineRequest.make(
                    str(self._num_requests), prompt, param, adapter=adapter, lora_request=given, priority=rank
                )
            )
            self._num_requests += 1
        return requests


def _merged(given: PoolingParams | None, **values: int | None) -> PoolingParams:
    """Return parameters with those values that aren't None."""
    base = given or PoolingParams()
    if not isinstance(base, PoolingParams):
        raise InvalidRequest(f"pooling_params: given {given!r:.80}, expected PoolingParams")
    fields = {name: getattr(base, name) for name in ("truncate_prompt_tokens", "dimensions")}
    fields |= {name: value for name, value in values.items() if value is not None}
    return PoolingParams(normalize=base.normalize, use_activation=base.use_activation, task=base.task, **fields)


def _pairs(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[tuple[str, str]]:
    first, second = ([each] if isinstance(each, str) else list(each) for each in (data_1, data_2))
    if not all(isinstance(text, str) for text in (*first, *second)):
        raise InvalidRequest("score: given data that is no text, expected strings, or lists of them")
    if len(first) == 1:
        first *= len(second)
    if not second or len(first) != len(second):
        raise InvalidRequest(
            f"score: given {len(first)} and {len(second)} texts, expected 1 and N, or N and N, of at least one"
        )
    return list(zip(first, second, strict=True))


_REFRESH_S = 0.1


class ProgressLine:
    """Counts finished prompts and generated tokens. Writes nothing unless enabled and the stream is a terminal."""

    def __init__(self, total: int, *, enabled: bool, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._enabled = enabled and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._total = total
        self._done = 0
        self._tokens = 0
        self._started = monotonic()
        self._shown_at = float("-inf")

    def note(self, *, tokens: int, finished: int) -> None:
        """Add what a step brought."""
        self._tokens += tokens
        self._done += finished
        if self._enabled and monotonic() - self._shown_at >= _REFRESH_S:
            self._show()

    def close(self) -> None:
        """Show the last state and end the line."""
        if self._enabled:
            self._show()
            self._stream.write("\n")
            self._stream.flush()

    def _show(self) -> None:
        self._shown_at = monotonic()
        rate = self._tokens / max(self._shown_at - self._started, 1e-9)
        self._stream.write(f"\r{self._done}/{self._total} prompts, {self._tokens} tokens, {rate:.0f} tokens/s\x1b[K")
        self._stream.flush()
