"""The engine: requests in, one step at a time, tokens and text out; and how long a sequence it takes on a machine."""

from __future__ import annotations

import logging
import random
from collections import abc
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from pagestream_engine.config import EngineConfig, import_plugins
from pagestream_engine.errors import ConfigError, EngineAsleep, InvalidRequest, InvariantViolation, OutOfMemory
from pagestream_engine.executor.base import Executor, RunnerFactory, facts_of, make_model_runner
from pagestream_engine.executor.inline import InlineExecutor
from pagestream_engine.executor.process import ProcessExecutor
from pagestream_engine.executor.rank_group import RankGroup
from pagestream_engine.features.beams import Searches, SearchLimits, make_search
from pagestream_engine.features.best_of import BestOf, make_candidates
from pagestream_engine.features.grammar.gate import GrammarGate
from pagestream_engine.features.lora.registry import AdapterRegistry
from pagestream_engine.features.sleep import Sleep, forget_prefixes
from pagestream_engine.intake import Intake
from pagestream_engine.kv_cache.block_pool import BlockPool, make_eviction_order
from pagestream_engine.kv_cache.host_tier import make_tier
from pagestream_engine.kv_cache.inspection import block_map, check_cache
from pagestream_engine.kv_cache.manager import CacheManager, fragmentation
from pagestream_engine.models.folder import model_revision, resolve_model
from pagestream_engine.models.tokenizer import load_tokenizer
from pagestream_engine.output import OutputProcessor, Pieces, Taken, failed_output, replay
from pagestream_engine.plan import ScheduledStep, StepResult
from pagestream_engine.preflight import check_options
from pagestream_engine.request import Choice, Request, Sequence, SequenceOutput, SequenceState
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.scheduler.policies import make_policy
from pagestream_engine.scheduler.scheduler import Scheduler, check_requests
from pagestream_engine.stats import BlockMap, EngineStats
from pagestream_engine.steps import PlanBuilder, StepPipeline
from pagestream_engine.wire.executor import ExecutorFacts

_log = logging.getLogger(__name__)


class Engine:
    """Continuous batching of one model. Not thread-safe: one thread calls it, or a lock does.

    Methods: the library's face, of which most hand over to a part.

    Args:
        model: a model folder, or the name of a Hugging Face repository.
        make_runner: builds the runner, which computes the steps.

    Raises:
        ModelNotFound: there is no such model.
        ConfigError: a setting does not fit the model or the memory, a plugin can't be imported, or no policy has the
            name that is set.
    """

    def __init__(  # noqa: PLR0915 - its parts, each made once
        self, model: str | Path, config: EngineConfig, *, make_runner: RunnerFactory = make_model_runner
    ) -> None:
        import_plugins(config.extensions.plugins)
        policy = make_policy(config.scheduler.scheduling_policy)
        self.interrupts = policy.interrupts
        """Whether a request of class 0 that finds no room takes it from lower classes."""
        self.queue_order = policy.queue_order
        """See SchedulingPolicy."""
        self.folder = folder = resolve_model(model)
        self.config = config
        self.tokenizer = load_tokenizer(folder)
        self.adapters = AdapterRegistry(folder, config.adapters)
        """LoRA adapters by name, which requests are given."""
        self._make_runner = make_runner
        executor = make_executor(make_runner, folder, config)
        facts = executor.facts
        self.kv_layout = facts.kv_layout
        self.block_size = facts.kv_layout.block_size
        self.max_model_len = fit_model_len(config, facts)
        self.model_context = facts.max_position_embeddings
        self.eos_token_ids = facts.eos_token_ids
        self.vocab_size, self.pooled_size = facts.vocab_size, facts.pooled_size  # see ExecutorFacts
        self.fingerprint = facts.fingerprint
        """16 hexadecimal digits of a digest over the model's revision, dtype, mode, kernels, instruction set and
        torch's version: deterministic engines that have it in common give the same tokens the same logits, bit for bit.
        Of weights the revision has samples alone: see `model_revision`."""
        self.is_deterministic = facts.is_deterministic
        """Whether a token's logits depend on its sequence alone, bit for bit."""
        self.load_s = facts.load_s
        """Seconds by part of the load: see ExecutorFacts."""
        order = make_eviction_order(config.cache.eviction_policy, facts.num_blocks)
        self._pool = BlockPool(facts.num_blocks, order)
        tier = make_tier(self._pool, facts.host_memory, facts.kv_layout, config.scheduler)
        caching = config.cache.enable_prefix_caching
        self._cache = CacheManager(self._pool, facts.kv_layout, enable_prefix_caching=caching, tier=tier)
        self._scheduler = Scheduler(
            config.scheduler, self._cache, policy, facts.num_speculative_tokens, adapters=config.adapters
        )
        is_async = config.executor.async_scheduling
        plans = PlanBuilder(config.scheduler.max_num_seqs, self._cache.layout)
        num_ahead = int(executor.overlaps if is_async is None else is_async)
        self._steps = StepPipeline(self._scheduler, plans, executor, num_ahead)
        self._gate = GrammarGate(self._steps, self._scheduler)
        # Releases memory while there are no requests.
        self.sleep = Sleep(self._steps, self._cache, self._gate.note, self.has_unfinished_requests)
        self._pieces = Pieces(self.tokenizer) if self.tokenizer is not None else None
        self._sequences: dict[str, Sequence] = {}
        """The unfinished ones, by their seq_id, but for beams."""
        self._searches: Searches | None = None
        """The beam searches, from the first one on."""
        self._search_limits = SearchLimits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            vocab_size=self.vocab_size,
            num_blocks=facts.num_blocks,
            layout=facts.kv_layout,
        )
        self._best_of: BestOf | None = None
        """The requests with `best_of`, from the first one on."""
        self._known_ids: list[Container[str]] = [self._sequences]
        """Ids of unfinished sequences, each kept by the part that it is in."""
        self._outputs = OutputProcessor(self._scheduler, self._sequences, self._pieces)
        self._already_ended: list[SequenceOutput] = []
        self._before_steps: list[Callable[[], None]] = []
        """Hooks of used features, run before each step."""
        self._after_steps: list[Callable[[list[SequenceOutput]], list[SequenceOutput]]] = []
        """Hooks of used features, run on each step's outputs."""
        self._seeds = random.Random(config.model.seed)
        self._intake = Intake(
            self.tokenizer,
            self._pieces,
            vocab_size=self.vocab_size,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
            max_logprobs=config.model.max_logprobs,
            num_kv_groups=len(self._cache.layout.groups),
            draw_seed=self.draw_seed,
            has_grammars=facts.has_grammars,
            can_pool=bool(facts.pooled_size),
            has_head=facts.has_head,
        )
        self.on_schedule: Callable[[ScheduledStep], None] | None = None
        """Gets each step before it runs, and must not keep it; on the thread that steps."""
        self._counts = _StepCounts()

    # -- requests --

    def add(self, request: Request) -> None:
        """Queue the choices of a prompt. They take seats as these come free, and end one by one. Those that start
        together compute it once; its blocks are shared, and a block that is not full is copied when they part.

        The outputs of a beam search, and of `best_of` choices, come together, when it ends. What an earlier run has put
        out of them is found again, and not put out again.

        Args:
            request: with at least one choice; all are added, or none. The next output of one that has output tokens is
                the token after them; if they reach the end already, it is that end without a token.

        Raises:
            InvalidRequest: names what is wrong (a `ValueError`). The engine is unhurt.
            PromptTooLong: the prompt leaves no room for a new token.
            EngineAsleep: the engine sleeps.
        """
        for _ in self.adding(request):
            pass

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: abc.Sequence[int],
        params: SamplingParams,
        *,
        output_token_ids: abc.Sequence[int] = (),
        **fields: Any,
    ) -> None:
        """Do `add` for one sequence, whose `seq_id` is `request_id`; `fields` are others of `Request`."""
        self.add(Request(prompt_token_ids, (Choice(request_id, params, output_token_ids),), **fields))

    def adding(self, request: Request) -> Iterator[None]:
        """Do `add` in parts, between which steps may run: each takes at most `REPLAY_TOKENS` output tokens.

        The choices are queued by the last one, which also finds ids that were added meanwhile, and an engine that fell
        asleep; until then an abort of its requests is ignored. Errors are those of `add`.
        """
        choices, adapter = request.choices, request.adapter
        seq_ids = [choice.seq_id for choice in choices]
        if not seq_ids or len(set(seq_ids)) < len(seq_ids):
            raise InvalidRequest(f"choices: given sequence ids {seq_ids}, expected at least one, and all different")
        if self.sleep.is_asleep or any(seq_id in ids for ids in self._known_ids for seq_id in seq_ids):
            raise self._refusal(seq_ids)
        if adapter is not None and not self.adapters.is_enabled:
            raise InvalidRequest(f"adapter: given {adapter.name}, expected none without enable_lora")

        if adapter is not None:
            self._follow_preparations()
            self._steps.loads_adapters = True
        if choices[0].params.use_beam_search:
            self._add_search(request, choices[0].params.width)
            return
        candidates = None
        if choices[0].params.best_of is not None and choices[0].params.has_best_of:
            candidates, choices = make_candidates(choices)
            seq_ids = list(candidates.entries)
        first_arrival = self._intake.take_arrivals(len(choices))
        made: list[tuple[Sequence, Taken | None]] = []
        for arrival, choice in enumerate(choices, first_arrival):
            seq = self._intake.make(request, choice, arrival)
            made.append((seq, (yield from replay(seq, choice.output_token_ids))))
        if self.sleep.is_asleep or any(seq_id in ids for ids in self._known_ids for seq_id in seq_ids):
            raise self._refusal(seq_ids)
        if self._steps.in_flight:
            self._drain_if_idle()
        if candidates is not None:
            if self._best_of is None:
                self._best_of = BestOf()
                self._known_ids.append(self._best_of)
                self._after_steps.append(self._best_of.take)
            self._best_of.add(candidates)
        self._queue(made)

    def _add_search(self, request: Request, width: int) -> None:
        search = make_search(self._intake.make, request, self._intake.take_arrivals(width), self._search_limits)
        if self._steps.in_flight:
            self._drain_if_idle()
        if self._searches is None:
            self._searches = self._outputs.searches = Searches(self._scheduler, self._cache, self._pieces)
            self._known_ids.append(self._searches)
        self._searches.add(search)

    def _queue(self, made: Iterable[tuple[Sequence, Taken | None]]) -> None:
        """Queue the choices of a prompt, but for those whose output is complete already."""
        open_ones: dict[str, Sequence] = {}
        for seq, end in made:
            if end is None:
                open_ones[seq.seq_id] = seq
            else:
                ended = SequenceOutput(seq.seq_id, None, end.text, end.finish_reason, end.stop_reason)
                self._already_ended.append(ended)
        if open_ones:
            self._sequences |= open_ones
            seqs = list(open_ones.values())
            if any(seq.params.structured_outputs is not None for seq in seqs):
                self._follow_preparations()
                self._gate.add(seqs)
            else:
                self._scheduler.add(*seqs)

    def abort_request(self, seq_id: str) -> None:
        """Drop one sequence, by its seq_id, and free its blocks; there will be no output. An unknown one is ignored."""
        if self._best_of is not None and self._best_of.abort(seq_id, self.abort_request):
            return
        self._already_ended = [output for output in self._already_ended if output.seq_id != seq_id]
        seq = self._sequences.pop(seq_id, None)
        if seq is not None:
            if not self._gate.abort(seq):
                self._scheduler.abort(seq)
        elif self._searches is not None and seq_id in self._searches:
            self._searches.abort(seq_id)

    def has_unfinished_requests(self) -> bool:
        """Whether a request waits for outputs. False where all have been aborted, although a step may be in flight."""
        return bool(self._sequences or self._searches or self._already_ended)

    def draw_seed(self) -> int:
        """Draw a seed for a request that has none; the draws are a function of the engine's own seed."""
        return self._seeds.getrandbits(63)

    def set_limits(self, max_num_seqs: int, *, saves_blocks: bool = True) -> None:
        """Change what the next steps may take. Nothing that runs is stopped: more sequences than allowed run to their
        ends, and none is admitted before.

        Args:
            max_num_seqs: sequences that run at once; from 1 to the configured limit; beyond, the nearer end holds.
            saves_blocks: whether evicted blocks go to host memory; those that are there stay.
        """
        self._scheduler.admission.seats.most = max(1, min(max_num_seqs, self.config.scheduler.max_num_seqs))
        if self._cache.tier is not None:
            self._cache.tier.saves_blocks = saves_blocks

    # -- steps --

    def step(self) -> list[SequenceOutput]:
        """Run one step: schedule, model, then text and ends.

        With `async_scheduling` a step is launched, and the one before it is waited for: its outputs are returned while
        the new one runs. The first call has no step to wait for.

        A step that runs out of memory gives nothing, and smaller ones follow; a request that does not fit alone ends
        with finish_reason "error". What else the runner raises comes through. The steps in flight count for nothing
        then, and can be run again; no request has moved. Grammars are compiled and adapters read beside the steps:
        requests wait for theirs, and end with finish_reason "error" where there will be none.

        Returns:
            An output for each new token, after those without one: the ends of requests whose output was complete when
            they were added, and prompts' log probabilities. A sequence that failed may end without a token.
        """
        steps, began = self._steps, perf_counter()
        for prepare in self._before_steps:
            prepare()
        launched = steps.launch_next(self.on_schedule)
        schedule_s = steps.schedule_s
        outputs = self._already_ended
        if steps.should_collect(launched):
            try:
                step, result = steps.collect()
            except OutOfMemory as error:
                _log.warning("%s; smaller steps follow", error)
                self._fail(steps.unfit, f"out of memory, although it ran alone: {error}")
                ended, self._already_ended = self._already_ended, []
                return self._finished(ended) if self._after_steps else ended
            before = perf_counter()
            tokens = result.tokens()
            self._scheduler.update_from_output(step, tokens)
            schedule_s += perf_counter() - before
            taken = self._outputs.process(step, tokens, result)
            if result.num_drafts is not None or not result.has_one_each:
                self._counts.note_result(result)
            num_generated = len([output for output in taken if output.token_id is not None])
            step_s = perf_counter() - began
            self._counts.note_step(step, num_generated, step_s, schedule_s)
            for learn in self._scheduler.learners:
                learn(step, step_s)
            outputs = outputs + taken
        elif (
            not launched
            and not outputs
            and not self._gate
            and not self._scheduler.residency.is_busy
            and (self._sequences or self._searches)
        ):
            num_waiting = len(self._sequences) + len(self._searches or ())
            raise InvariantViolation(f"{num_waiting} requests wait and nothing can run")
        self._already_ended = []  # Not before `collect`: an error that it raises loses none of them.
        return self._finished(outputs) if self._after_steps else outputs

    def check_executor(self) -> None:
        """Notice that the executor has died while nothing runs; a step notices it by itself.

        Raises:
            ExecutorDied: its process has ended.
        """
        self._steps.executor.check_alive()

    def restart_executor(self) -> None:
        """Start another executor after `ExecutorDied`. All requests go on; what they had computed is computed again.

        Raises:
            InvariantViolation: it loads something else than the first one did.
        """
        first = self._steps.executor
        self._steps.roll_back()
        self._scheduler.residency.forget()
        first.close()
        forget_prefixes(self._cache)
        cache = replace(self.config.cache, num_gpu_blocks_override=first.facts.num_blocks)
        self._steps.executor = make_executor(self._make_runner, self.folder, replace(self.config, cache=cache))
        self._gate.prepare_again()
        if self._steps.executor.facts.fingerprint != first.facts.fingerprint:
            raise InvariantViolation("the model has changed since the first executor has loaded it")
        self.sleep.is_asleep = False

    @property
    def revision(self) -> str:
        """Of the model's files: see `model_revision`."""
        return model_revision(self.folder)

    @property
    def num_requeues(self) -> int:
        """How often running sequences went back to the queue since the start: preempted, or with a failed step."""
        return self._scheduler.num_requeues

    def stats(self) -> EngineStats:
        """A snapshot of load, cache and work done."""
        pool, counts, tier = self._pool, self._counts, self._cache.tier
        host = self._steps.executor.facts.host_memory
        page_bytes = 0 if host is None else host.page_bytes
        num_held = len(self._gate) if self._before_steps else 0
        load = self._scheduler.load()
        return EngineStats(
            num_running=load.num_running,
            num_waiting=load.num_waiting + num_held,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_claimable_blocks=load.num_claimable_blocks,
            kv_utilization=1.0 - pool.num_free / pool.num_blocks,
            kv_demand=1.0 + (load.num_preempted_blocks - pool.num_free) / pool.num_blocks,
            prefix_query_tokens=self._cache.num_query_tokens,
            prefix_hit_tokens=self._cache.num_hit_tokens,
            host_hit_tokens=self._cache.num_host_hit_tokens,
            num_host_pages=0 if tier is None else tier.num_pages,
            num_used_host_pages=0 if tier is None else tier.num_used_pages,
            saved_bytes=0 if tier is None else tier.num_saved * page_bytes,
            loaded_bytes=0 if tier is None else tier.num_loaded * page_bytes,
            num_preemptions=self._scheduler.num_preemptions,
            num_displaced=self._scheduler.num_displaced,
            num_steps=counts.num_steps,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_generated_tokens=counts.num_generated_tokens,
            num_drafts=counts.num_drafts,
            num_late_masks=counts.num_late_masks,
            num_draft_tokens=counts.num_draft_tokens,
            accepted_by_position=tuple(counts.accepted_by_position),
            last_step_sequences=counts.last_step_sequences,
            last_step_prompt_tokens=counts.last_step_prompt_tokens,
            last_step_s=counts.last_step_s,
            last_schedule_s=counts.last_schedule_s,
            total_step_s=counts.total_step_s,
            total_schedule_s=counts.total_schedule_s,
        )

    def fragmentation(self) -> float:
        """The share of the slots in referenced blocks that hold no token; O(running sequences), between two steps."""
        return fragmentation(self._cache, self._scheduler.running())

    def block_map(self) -> BlockMap:
        """Which sequences hold which blocks, between two steps; see `inspection.block_map` for its cost and bounds."""
        scheduler = self._scheduler
        num_waiting = scheduler.num_waiting + len(self._gate)
        return block_map(self._pool, scheduler.running(), num_running=scheduler.num_running, num_waiting=num_waiting)

    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes of the device's memory by use; empty for a runner without any."""
        return self._steps.executor.facts.memory_bytes

    def close(self) -> None:
        """End the executor, with its process where it has one. The engine can't be used after it."""
        self._steps.executor.close()

    def check_invariants(self) -> None:
        """Check the bookkeeping of blocks between two steps; O(blocks), so for tests and idle times.

        Raises:
            InvariantViolation: names the first contradiction.
        """
        sequences = list(self._scheduler.sequences())
        drafts = self._steps.executor.facts.num_speculative_tokens
        cache = self._cache
        check_cache(self._pool, cache.layout, sequences, cache.copy_on_write, num_drafts=drafts, tier=cache.tier)
        check_requests(sequences)
        held = len(self._gate)
        sequences += self._gate.sequences()
        beam_ids = set[str]() if self._searches is None else set(self._searches.beam_ids())
        if {seq.seq_id for seq in sequences} != self._sequences.keys() | beam_ids:
            raise InvariantViolation("the scheduler's sequences are not the engine's requests")
        if len(sequences) != self._scheduler.num_running + self._scheduler.num_waiting + held:
            raise InvariantViolation("the scheduler's counts do not match its sequences")

    # -- inside --

    def _follow_preparations(self) -> None:
        """Ask before each step from now on what was prepared beside steps: grammars, adapters."""
        if not self._before_steps:
            self._before_steps.append(self._take_prepared)

    def _take_prepared(self) -> None:
        """Go on with what waits for grammars and adapters that are ready, and end what has none."""
        for refused in self._gate.release():
            del self._sequences[refused.seq_id]
            self._already_ended.append(refused)
        for failed in self._scheduler.residency.take_failed():
            _log.warning("%s", failed.error)
            lost = [seq for seq in self._scheduler.sequences() if seq.adapter_revision == failed.revision]
            self._fail(lost, failed.error or "")

    def _finished(self, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        for change in self._after_steps:
            outputs = change(outputs)
        return outputs

    def _drain_if_idle(self) -> None:
        if not self._sequences and not self._searches:
            self._steps.drain()

    def _refusal(self, seq_ids: list[str]) -> EngineAsleep | InvalidRequest:
        """Return why sequences with these ids can't be added: one of them runs, or the engine sleeps."""
        if self.sleep.is_asleep:
            return EngineAsleep("the engine sleeps, and takes no requests; call wake_up() before")
        running = next(seq_id for seq_id in seq_ids if any(seq_id in ids for ids in self._known_ids))
        return InvalidRequest(f"seq_id: given {running!r}, which is running; expected a new one")

    def _fail(self, seqs: Iterable[Sequence], reason: str) -> None:
        """End sequences, with their searches; their ends are put out with the next outputs."""
        for seq in [seq for seq in seqs if seq.state is not SequenceState.FINISHED]:
            if self._searches is not None and seq.seq_id in self._searches:
                self._already_ended += self._searches.fail(seq.seq_id, reason)
            elif not seq.params.use_beam_search:  # else its search has failed with another beam
                del self._sequences[seq.seq_id]
                self._scheduler.abort(seq)
                self._already_ended.append(failed_output(seq, reason))


class _StepCounts:
    """Counts of the collected steps from the engine's start, and times of the last one, in seconds."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.accepted_by_position: list[int] = []
        self.num_late_masks = 0
        self.last_step_sequences = 0
        self.last_step_prompt_tokens = 0
        self.last_step_s = 0.0
        self.last_schedule_s = 0.0
        self.total_step_s = 0.0
        self.total_schedule_s = 0.0

    def note_result(self, result: StepResult) -> None:
        """Count what a step has drafted, what of it held, and the rows that sat the step out."""
        if not result.has_one_each:
            has_none = result.counts == 0
            self.num_late_masks += int(has_none.sum()) - int(has_none[list(result.errors)].sum())
        if result.num_drafts is None:
            return
        self.num_drafts += int((result.num_drafts > 0).sum())
        self.num_draft_tokens += int(result.num_drafts.sum())
        num_accepted = result.counts[result.num_drafts > 0] - 1
        most = int(result.num_drafts.max())
        self.accepted_by_position += [0] * (most - len(self.accepted_by_position))
        for position in range(most):
            self.accepted_by_position[position] += int((num_accepted > position).sum())

    def note_step(self, step: ScheduledStep, num_generated_tokens: int, step_s: float, schedule_s: float) -> None:
        """Count a collected step: the tokens that went out, its seconds, and the scheduler's share of these."""
        self.num_steps += 1
        self.last_step_sequences = len(step.decodes) + sum(1 + len(chunk.siblings) for chunk in step.prefills)
        self.last_step_prompt_tokens = sum(chunk.num_scheduled_tokens for chunk in step.prefills)
        self.num_prompt_tokens += self.last_step_prompt_tokens
        self.num_generated_tokens += num_generated_tokens
        self.last_step_s, self.last_schedule_s = step_s, schedule_s
        self.total_step_s += step_s
        self.total_schedule_s += schedule_s


@dataclass(frozen=True)
class Capacity:
    """What an engine would take on this machine now."""

    max_model_len: int
    """Tokens of the longest sequence, prompt and output together."""
    model_context: int
    """Tokens of the longest sequence that the model allows."""
    num_sequences: int
    """Sequences of `max_model_len` tokens that the KV pool would hold at once."""


def measure_capacity(
    model: str | Path, config: EngineConfig, *, make_runner: RunnerFactory = make_model_runner
) -> Capacity:
    """Load a model and run what sizes its KV pool, without allocating that, where it is not divided among ranks.

    Args:
        model: a model folder, or the name of a Hugging Face repository.

    Raises:
        EngineError: an engine with these settings would not start, for this reason.
    """
    import_plugins(config.extensions.plugins)
    facts = _measure(resolve_model(model), config, make_runner)
    num_blocks = facts.num_blocks
    longest = fit_model_len(config, facts)
    held = facts.kv_layout.num_blocks_for(longest, config.scheduler.max_num_batched_tokens)
    return Capacity(longest, facts.max_position_embeddings, max(1, num_blocks // held))


def _measure(folder: Path, config: EngineConfig, make_runner: RunnerFactory) -> ExecutorFacts:
    if config.parallel.num_ranks > 1:
        executor = make_executor(make_runner, folder, config)
        executor.close()
        return executor.facts
    runner = make_runner(folder, config)
    return facts_of(runner, config.cache.num_gpu_blocks_override or runner.profile_num_blocks())


def fit_model_len(config: EngineConfig, facts: ExecutorFacts) -> int:
    """Return the tokens of the longest sequence: what was asked for, or what model and pool allow. One sequence alone
    must always fit.

    Raises:
        ConfigError: what was asked for does not fit, or nothing does.
    """
    num_blocks = facts.num_blocks
    asked, of_model = config.model.max_model_len, facts.max_position_embeddings
    of_pool = facts.kv_layout.max_tokens(num_blocks, max(of_model, asked or 0))
    if asked is None:
        if of_pool < of_model:
            _log.warning("the KV pool holds %d tokens: max_model_len is that, not the model's %d", of_pool, of_model)
        asked = min(of_model, of_pool)
    if asked > of_model:
        raise ConfigError("max_model_len", asked, f"at most {of_model}", "the model's positions end there")
    if asked > of_pool:
        hint = "lower it, or give the pool more (num_gpu_blocks_override, gpu_memory_utilization)"
        raise ConfigError("max_model_len", asked, f"at most {of_pool}, what {num_blocks} KV blocks hold", hint)
    if asked < 2:
        raise ConfigError("num_gpu_blocks_override", num_blocks, "room for at least 2 tokens", "raise it or block_size")
    return asked


def make_executor(make_runner: RunnerFactory, folder: Path, config: EngineConfig) -> Executor:
    """Load a model into an executor of the configured kind."""
    if config.parallel.num_ranks > 1:
        check_options(folder, config)  # before each rank's process has imported torch
        return RankGroup(make_runner, folder, config)
    kind = ProcessExecutor if config.executor.executor == "process" else InlineExecutor
    return kind(make_runner, folder, config)
