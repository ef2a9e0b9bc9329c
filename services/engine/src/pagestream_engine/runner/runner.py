"""Runs steps by their plans: owns the model, the attention backend with its cache, the batch and the sampler."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pagestream_engine.attention import prefers_triton
from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError, OutOfMemory, is_out_of_memory
from pagestream_engine.features.grammar.compiler import GrammarCompiler
from pagestream_engine.features.grammar.sampling import ConstrainedSampling
from pagestream_engine.features.lora.pool import attach_adapters
from pagestream_engine.features.speculation.draft_model import TargetBlocks, load_draft, open_draft
from pagestream_engine.features.speculation.drafts import Drafts
from pagestream_engine.features.speculation.speculation import make_speculation
from pagestream_engine.features.speculation.verify import verify
from pagestream_engine.models.config import DTYPES, ModelInfo
from pagestream_engine.models.model import Target
from pagestream_engine.models.offload import Copier, MovedTensors, moved_tensors
from pagestream_engine.models.registry import open_model
from pagestream_engine.parallel.stages import open_group
from pagestream_engine.plan import HostMemory, PendingResult, StepPlan
from pagestream_engine.runner.backends import backend_for, plan_cache
from pagestream_engine.runner.batch import PersistentBatch, pending_result, with_prompts
from pagestream_engine.runner.graphs import CudaGraphRecorder, DecodeGraphs, Recorder, can_record, graph_sizes
from pagestream_engine.runner.host_pages import HostPages
from pagestream_engine.runner.memory import (
    available_bytes,
    check_weights_fit,
    cpu_pool_bytes,
    estimated_cpu_step_bytes,
    give_back_memory,
    gpu_pool_bytes,
    largest_gpu_use,
    load_model,
    offload_target,
    warm_up_plans,
)
from pagestream_engine.runner.numerics import check_model_allows, fingerprint, settle_numerics, wants_exact_linears
from pagestream_engine.runner.prompts import PromptWork, Reported
from pagestream_engine.runner.sampled_tokens import SampledTokens
from pagestream_engine.sampler import SamplingBatch
from pagestream_engine.transfers import to_device

_log = logging.getLogger(__name__)


class ModelRunner:
    """One model on one device.

    Construct, `allocate_kv_cache`, `warm_up`, then `execute` any number of steps. Not thread-safe: the engine's step
    loop owns it. `adapters` reads those that rows may have, and is None without `enable_lora`.
    """

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        device: torch.device,
        recorder: Recorder | None = None,
        copier: Copier | None = None,
    ) -> None:
        """Load the weights.

        Args:
            device: that computes.
            recorder: of steps of decodes; None: CUDA graphs on a GPU, unless `enforce_eager`.
            copier: of offloaded weights; None: a stream of a GPU's.

        Raises:
            ModelError: the folder is incomplete, or holds a model that is not supported, or does not fit into memory.
            ConfigError: there is no such device, or an option does not fit it or the model.
        """
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device", device.type, "cpu or auto", "torch finds no GPU on this machine")
        source = open_model(model_dir)
        info = source.info
        self.device = device
        self.dtype = _settled_dtype(config.model.dtype, info, device)
        self._config = config
        self.max_model_len = _max_model_len(config.model.max_model_len, info)
        self.model_info = replace(info, max_position_embeddings=max(info.max_position_embeddings, self.max_model_len))
        wanted, by_triton = config.model.deterministic, prefers_triton(config.model.attention_backend, device)
        check_model_allows(wanted, source, by_triton=by_triton)
        exact_linears = wants_exact_linears(wanted, self.dtype, device, by_triton=by_triton)
        self.select_device()
        self._ranks, self._stage = open_group(config.rank, device, self.dtype, fixed_order=exact_linears)
        target = Target(
            self.dtype,
            device,
            self.max_model_len,
            exact_linears,
            by_triton,
            int(config.model.shared_weights_gb * 2**30),
            config.model.quantization,
            offload_target(config.model.cpu_offload_gb, source, device, copier),
            self._ranks,
            self._stage,
        )
        opened = open_draft(config.speculation.speculative_model, info, target)
        num_bytes = source.weight_bytes(target) + (0 if opened is None else opened.weight_bytes)
        check_weights_fit(num_bytes, device, config.cache.gpu_memory_utilization)
        with torch.inference_mode():
            specs = source.attention_specs(target)
            self.kv_layout, shapes, self._whole_shapes = plan_cache(
                specs, config, self.max_model_len, self.dtype, device
            )
            self._backend = backend_for(
                config.model.attention_backend, specs, shapes, device, deterministic=wanted is True
            )
            if self._backend.is_deterministic and not self._backend.attention.prefill_equals_decode:
                self.kv_layout = replace(self.kv_layout, separates_outputs=True)
            self._model = load_model(source, target, self._backend)
            check_model_allows(wanted, self._model)
            self.numerics = settle_numerics(self._model, self._backend, self.dtype, exact_linears=exact_linears)
            blocks = TargetBlocks(self.kv_layout, self._backend.store)
            draft = None if opened is None else load_draft(opened, config, target, blocks)
        self._draft_bytes = 0 if draft is None else draft.model.weight_bytes()
        self.adapters = attach_adapters(source, self._model, config.adapters, target)
        self.grammars = GrammarCompiler(model_dir, info.vocab_size, info.eos_token_ids)
        """Compiles what requests ask their outputs to match."""
        self._model_dir, self._plugin_digest, self._may_have_experts = (
            model_dir,
            source.plugin_digest,
            source.may_have_experts,
        )
        self._num_blocks, self._num_compilations, self.pooled_size = (
            0,
            0,
            self._model.pooled_size and source.pooled_size,
        )
        self._host_pages: HostPages | None = None
        self._moved: MovedTensors | None = None  # what a GPU's tensors held before it went to sleep
        # Graphs with exchanges between ranks have not been tried.
        if recorder is None and device.type == "cuda" and not config.model.enforce_eager and config.rank.size == 1:
            recorder = CudaGraphRecorder(device)
        can_be_used = recorder is not None and can_record(self._model, self._backend, recorder)
        self._recorder = recorder if can_be_used else None
        self._graphs: DecodeGraphs | None = None
        self._graph_sizes = graph_sizes(config.scheduler.max_num_seqs)
        self._batch = PersistentBatch(
            config.scheduler.max_num_seqs,
            self.max_model_len,
            [group.block_size for group in self.kv_layout.groups],
            device,
            sends_lengths=self._backend.attention.reads_device_lengths,
        )
        self.num_speculative_tokens = config.speculation.most_drafts
        self._sampling = self._new_sampling()
        self._speculation = make_speculation(
            config, draft, self._batch, lambda: self._sampling, ranks=self._ranks, stage=self._stage
        )
        self._stage_tokens = (
            SampledTokens(self._stage, self._batch, self.num_speculative_tokens) if self._stage.count > 1 else None
        )
        self.forget_rows()

    def select_device(self) -> None:
        """Make the runner's GPU the current one of the calling thread. A thread begins with GPU 0, and a call of CUDA's
        that names no device opens a context there: half a gigabyte that another rank counts on."""
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits: in deterministic mode, engines that have them in common compute the same bits."""
        return fingerprint(
            self._model_dir,
            self._backend,
            self.max_model_len,
            self.numerics,
            self._plugin_digest,
            has_experts=self._may_have_experts,
            shapes=self._whole_shapes,
            quantization=self._config.model.quantization,
            num_ranks=self._ranks.size,
            takes_adapters=self._config.adapters.enable_lora,
        )

    @property
    def has_head(self) -> bool:
        """Whether the model has logits of a vocabulary."""
        return self.model_info.has_head

    @property
    def is_deterministic(self) -> bool:
        """Whether a token's logits depend on its sequence alone, bit for bit."""
        return self.numerics.deterministic

    @property
    def forward_gives_logits(self) -> bool:
        """Whether the model's results are logits before pieces of them are made."""
        return self._model.forward_gives_logits

    @property
    def launches_ahead(self) -> bool:
        """Whether `execute` returns before the step is done."""
        return self.device.type == "cuda" and self._speculation is None  # Drafts follow from the tokens before them.

    def profile_num_blocks(self) -> int:
        """Blocks of the cache: what fits beside the largest step and can be used.

        Raises:
            ConfigError: not even one block fits, or a kernel can't be compiled for this device.
            OutOfMemory: the largest step alone does not fit.
        """
        cache, scheduler = self._config.cache, self._config.scheduler
        with self._compiling():
            pool_bytes, step_bytes = self._profile()
        block_bytes = self._backend.store.block_bytes
        if pool_bytes < block_bytes * (1 + self._num_padding_blocks):
            raise ConfigError(
                "gpu_memory_utilization",
                cache.gpu_memory_utilization,
                f"room for a step of {step_bytes} bytes and for blocks of {block_bytes} bytes",
                "free some memory, lower max_num_batched_tokens, max_num_seqs or block_size, or set "
                "num_gpu_blocks_override",
            )
        longest = self.kv_layout.num_blocks_for(self.max_model_len, scheduler.max_num_batched_tokens)
        num_blocks = min(pool_bytes // block_bytes - self._num_padding_blocks, scheduler.max_num_seqs * longest)
        return self._ranks.least(num_blocks)

    def _profile(self) -> tuple[int, int]:
        """Run the largest steps on a cache of one block. Return the bytes for the pool, and of the largest step."""
        self._backend.store.allocate(1)
        vocab_size = self.model_info.vocab_size
        try:
            if self.device.type == "cuda":
                use = largest_gpu_use(self, self._config, self.device, vocab_size)
                sizes = self._graph_sizes if self._recorder is not None else ()
                share = self._config.cache.gpu_memory_utilization
                step_bytes, pool_bytes = use.step, gpu_pool_bytes(use, share, len(sizes))
            else:
                step_bytes = estimated_cpu_step_bytes(self, self._config, vocab_size)
                num_ranks = self._config.rank.num_local
                host_bytes = int(self._config.cache.swap_space * 2**30) // num_ranks
                pool_bytes = cpu_pool_bytes(step_bytes, host_bytes, num_ranks=num_ranks)
        finally:
            self.forget_rows()
        _log.info("the largest step takes %d MiB, the KV pool gets %d MiB", step_bytes >> 20, pool_bytes >> 20)
        return pool_bytes, step_bytes

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the cache; block ids are 0 to `num_blocks - 1`.

        Raises:
            ConfigError: `num_blocks` is below 1, or more than there is memory for.
        """
        if num_blocks < 1:
            raise ConfigError("num_gpu_blocks_override", num_blocks, "at least 1")
        free = _free_bytes(self.device, self._config.rank.num_local)
        most = free // self._backend.store.block_bytes - self._num_padding_blocks
        if num_blocks > most:
            hint = "lower it, or leave it out to take what fits"
            expected = f"at most {most}, blocks of {self._backend.store.block_bytes} bytes in the memory that is free"
            raise ConfigError("num_gpu_blocks_override", num_blocks, expected, hint)
        self._backend.store.allocate(num_blocks + self._num_padding_blocks)
        self._num_blocks = num_blocks

    def allocate_host_pages(self) -> HostMemory:
        """Allocate this rank's part of the pages beyond the device, once the cache is allocated.

        Raises:
            ConfigError: they do not hold one block, or there is less memory.
        """
        store, num_ranks = self._backend.store, self._config.rank.num_local
        self._host_pages = pages = HostPages.of(store, self._config.cache, available_bytes() // num_ranks, num_ranks)
        num_pages = self._ranks.least(len(pages))
        return HostMemory(num_pages, store.block_bytes, self._ranks.first(pages.measure_load_s()))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels that steps launch, and record the steps of decodes, where there are such things.

        Raises:
            ConfigError: a kernel can't be compiled for this device.
        """
        with self._compiling():
            if self._backend.compiles:
                self._compile()
            if self._recorder is not None:
                self._batch.set_padding_block(self._num_blocks)
                self._graphs = DecodeGraphs(self._model, self._backend, self._batch, self._graph_sizes)
                self._graphs.record(self._recorder)
        self._num_compilations = self._backend.num_compilations()

    def _compile(self) -> None:
        for plan in warm_up_plans(self._config, self.kv_layout, self.max_model_len, self.model_info.vocab_size):
            try:
                self.execute(plan)()
            except OutOfMemory as error:  # the pool was set by hand: steps will be halved
                if self._stage.count > 1:  # others wait for what this stage has not sent
                    raise
                _log.warning("warm-up: %s", error)
        self.forget_rows()

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Raise what a compiler raises inside as a ConfigError: an engine that is started again fails as this one."""
        try:
            yield
        except self._backend.compile_errors as error:
            last_line = str(error).rstrip().rpartition("\n")[2]
            hint = f"a kernel can't be compiled for this device: {type(error).__name__}: {last_line}"
            name = self._config.model.attention_backend
            raise ConfigError("attention_backend", name, "torch", hint) from error

    @property
    def num_late_compilations(self) -> int:
        """Kernels that were compiled, or fetched from Triton's cache folder, since `warm_up`: each held up a step."""
        return self._backend.num_compilations() - self._num_compilations

    def sleep(self) -> None:
        """Free the cache, host pages, recorded steps, adapters' slots and rows. A GPU's weights go to host memory, a
        CPU's stay where they are.

        Whatever holds addresses of this memory is emptied here, and filled again by the first step that needs it.
        """
        # First whatever holds an address: after waking, its kernels would read freed memory.
        self._graphs = None
        if self.adapters is not None:
            self.adapters.empty_slots()
        self._backend.store.release()
        if self._host_pages is not None:
            self._host_pages.release()
        self.forget_rows()
        self._moved = moved_tensors((self._model, self._speculation, self._backend), self.device)
        give_back_memory(self.device)

    def wake_up(self) -> None:
        """Have all of that again, with an empty cache, and warm up.

        Raises:
            ConfigError: there is no memory for the cache any more.
            RuntimeError: likewise, for the weights.
        """
        if self._moved is not None:
            moved, self._moved = self._moved, None
            moved.restore()
        self.allocate_kv_cache(self._num_blocks)
        if self._host_pages is not None:
            self._host_pages.allocate()
        self.warm_up()

    @property
    def _num_padding_blocks(self) -> int:
        """Blocks of the cache that no sequence gets: recorded steps write there in the places that they don't need."""
        return 0 if self._recorder is None else 1

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of weights ("model", with a draft model's) and of the KV cache ("kv_pool"), without what a step needs
        for itself."""
        num_blocks = self._num_blocks + self._num_padding_blocks
        weight_bytes = self._model.weight_bytes() + self._draft_bytes
        return {"model": weight_bytes, "kv_pool": num_blocks * self._backend.store.block_bytes}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingResult:
        """Edit the persistent batch, and launch a step's model and sampling.

        Returns:
            What waits for the sampled tokens.

        Raises:
            OutOfMemory: the step needs more memory than there is; a smaller one may fit.
        """
        with step_memory(plan.num_tokens, len(plan.sampled_rows)):
            if self._stage_tokens is not None:
                self._stage_tokens.receive(plan)
            if plan.reset:
                self.forget_rows()
            self._edit(plan)
            if self._speculation is not None:
                compute = self._execute if self._stage_tokens is None else self._stage_tokens.shared(self._execute)
                return self._speculation.run(plan, compute, self._batch.correct_drafts)
            return self._execute(plan)

    def _edit(self, plan: StepPlan) -> None:
        self._batch.apply(plan)
        if self._prompt_work.rows or any(
            new.num_prompt_logprobs is not None or new.params.pooling is not None for new in plan.added
        ):
            self._prompt_work.edit(plan)
        if self._stage.is_last:
            if len(plan.removed) or len(plan.added):
                _edit_sampling(self._sampling, plan)
            if self._sampling.matchers:
                self._sampling.begin_step()
        if self.adapters is not None:
            self.adapters.apply(plan)
        if self._host_pages is not None:
            self._host_pages.launch(plan.saves.tolist(), plan.loads.tolist())
        if len(plan.copies):
            self._backend.store.copy_blocks(plan.copies.tolist())

    def _execute(self, plan: StepPlan, drafts: Drafts | None = None) -> PendingResult:
        """Compute and sample the rows of a plan that the batch has been edited by.

        A plain step is: the batch's inputs, `prepare_step` of the backend, the model's `forward` and `logits`, then
        `_sample`. The branches beside it are for CUDA graphs, adapters, what is wanted of prompts (log probabilities,
        pooling), pipeline stages before the last one, and drafts.
        """
        if not len(plan.rows):
            return pending_result(plan.step_id, None)
        adapted = None if self.adapters is None else self.adapters.begin_step(plan)
        if self._graphs is not None and adapted is None and self._graphs.takes(plan):
            rows, hidden = self._graphs.run(plan.rows, self._batch.count_computed(plan))
            return self._sample(plan, self._model.logits(hidden), rows, None)
        inputs = self._batch.inputs(plan, drafts)
        context = self._backend.prepare_step(inputs.attention)
        prompt_tokens = self._prompt_work.take(plan) if self._prompt_work.rows else None
        wanted = inputs.sample_places if prompt_tokens is None else prompt_tokens.places
        if adapted is not None:
            hidden = adapted.forward(self._model, inputs.token_ids, wanted, context)
        else:
            hidden = self._model.forward(inputs.token_ids, wanted, context)
        if self._stage_tokens is not None and not self._stage.is_last:
            return self._stage_tokens.result_of(plan)
        reported: Reported | None = None
        if prompt_tokens is not None:
            reported = self._prompt_work.report(prompt_tokens, hidden)
            hidden = hidden[prompt_tokens.sampling]
        if not len(plan.sampled_rows):
            return pending_result(plan.step_id, None, reported)
        logits = self._model.logits(hidden)
        if drafts is not None and inputs.sample_logits is not None:
            sampling = self._sampling if self._sampling.matchers else self._sampling.batch
            result = verify(plan, drafts, logits, inputs.sample_logits, sampling)
            return with_prompts(result, reported)
        if inputs.sample_logits is not None:
            logits = logits[inputs.sample_logits]
        return self._sample(plan, logits, inputs.sampled_rows, reported)

    def _sample(self, plan: StepPlan, logits: Tensor, rows: Tensor, reported: Reported | None) -> PendingResult:
        """Sample for `rows` (samples,) int64 of the batch from (samples, vocab_size) logits."""
        sampling = self._sampling if self._sampling.matchers else self._sampling.batch
        sampled = sampling.sample(logits, plan.sampled_rows)
        if sampled.left_out:
            self._batch.take_back(plan.sampled_rows[list(sampled.left_out)].tolist())
            kept = np.setdiff1d(np.arange(len(plan.sampled_rows)), sampled.left_out)
            places = to_device(torch.from_numpy(kept), self.device)
            self._batch.next_tokens.index_copy_(0, rows[places], sampled.token_ids[places])
        else:
            self._batch.next_tokens.index_copy_(0, rows, sampled.token_ids)
        if self._stage_tokens is not None:
            self._stage_tokens.give(plan, sampled)
        return pending_result(plan.step_id, sampled, reported)

    def forget_rows(self) -> None:
        self._batch.forget_rows()
        if self.adapters is not None:
            self.adapters.forget_rows()
        self._prompt_work = PromptWork(self._model, self.device)
        self._sampling.forget_rows()
        self._sampling = self._new_sampling()

    def _new_sampling(self) -> ConstrainedSampling:
        info = self.model_info
        return ConstrainedSampling(
            SamplingBatch(self._config.scheduler.max_num_seqs, info.vocab_size, self.device),
            self.grammars,
            info.vocab_size,
            self.device,
            wait_s=self._config.scheduler.mask_wait_ms / 1000,
            agree=self._ranks.first_of_stage if self._ranks.size > 1 else None,
        )


def _edit_sampling(sampling: ConstrainedSampling, plan: StepPlan) -> None:
    """Take the rows that a plan removes and adds; those without a grammar are the batch's alone."""
    for row in plan.removed.tolist():
        (sampling if row in sampling.matchers else sampling.batch).remove(row)
    for new in plan.added:
        prompt, output = np.split(new.token_ids, [new.num_prompt_tokens])
        (sampling.batch if new.params.structured_outputs is None else sampling).add(
            new.row,
            new.params,
            seed=new.seed,
            end_token_ids=new.end_token_ids,
            prompt_token_ids=prompt,
            output_token_ids=output,
        )


def _free_bytes(device: torch.device, num_ranks: int) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes() // num_ranks


def _settled_dtype(given: str, info: ModelInfo, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in, and log it with the device."""
    dtype = DTYPES.get(given, info.dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    place = {"device": name, "dtype": str(dtype).removeprefix("torch.")}
    _log.info("the model computes on %(device)s in %(dtype)s", place, extra=place)
    return dtype


def _max_model_len(given: int | None, info: ModelInfo) -> int:
    if given is None:
        if info.extended_context > info.max_position_embeddings:
            message = "the model's context is %d tokens; a max_model_len of up to %d extends it by its rope scaling"
            _log.info(message, info.max_position_embeddings, info.extended_context)
        return info.max_position_embeddings
    longest = max(info.max_position_embeddings, info.extended_context)
    if given > longest:
        raise ConfigError("max_model_len", given, f"at most the model's context of {longest}")
    return given


@contextmanager
def step_memory(num_tokens: int, num_samples: int) -> Iterator[None]:
    """Raise what torch raises where memory runs out inside as OutOfMemory of a step of this size."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise OutOfMemory(f"a step of {num_tokens} tokens and {num_samples} samples: {first_line}") from error
