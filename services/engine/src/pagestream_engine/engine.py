"""The engine: requests in, one step at a time, tokens and text out."""

from __future__ import annotations

import logging
import random
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from collections.abc import Sequence as Items
from collections.abc import Sequence as Tokens
from pathlib import Path
from time import perf_counter
from typing import Protocol, runtime_checkable

from pagestream_engine.cache.block_pool import BlockPool
from pagestream_engine.cache.invariants import check_cache
from pagestream_engine.cache.manager import CacheManager
from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError, InvalidRequest, InvariantViolation, PromptTooLong
from pagestream_engine.models.folder import load_tokenizer, resolve_model
from pagestream_engine.request.generation import Generation, Taken
from pagestream_engine.request.outputs import EngineStats, StepOutput, TokenLogprob
from pagestream_engine.request.sampling_params import ALL_LOGPROBS, SamplingParams
from pagestream_engine.request.sequence import Sequence, Sibling
from pagestream_engine.scheduler.base import RankedToken, SampledTokens, ScheduledStep
from pagestream_engine.scheduler.invariants import check_groups
from pagestream_engine.scheduler.policy import make_policy
from pagestream_engine.scheduler.scheduler import Scheduler
from pagestream_engine.text.detokenizer import IncrementalDetokenizer, Pieces

_log = logging.getLogger(__name__)


REPLAY_TOKENS = 512
"""Output tokens that one part of `adding_group` replays: 1.5 ms, with stop strings 7 ms."""


class ModelFacts(Protocol):
    """What the engine must know of a model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def eos_token_ids(self) -> Tokens[int]: ...


class Runner(Protocol):
    """What runs the steps: `runner.ModelRunner`, or a small real one in tests."""

    @property
    def model_config(self) -> ModelFacts: ...
    @property
    def fingerprint(self) -> str: ...
    def profile_num_blocks(self) -> int: ...
    def allocate_kv_cache(self, num_blocks: int) -> None: ...
    def execute(self, step: ScheduledStep) -> SampledTokens: ...


@runtime_checkable
class Weighed(Protocol):
    """A runner that takes memory: a real one."""

    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes of the device's memory by use."""
        ...


RunnerFactory = Callable[[Path, EngineConfig], Runner]


def make_model_runner(folder: Path, config: EngineConfig) -> Runner:
    """Load the model onto the configured device."""
    import torch

    from pagestream_engine.runner.runner import ModelRunner

    device = config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return ModelRunner(folder, config, torch.device(device))


class Engine:
    """Continuous batching of one model. Not thread-safe: one thread calls it, or a lock does.

    Args:
        model: a model folder, or the name of a Hugging Face repository.
        config: settings.
        make_runner: builds the runner, which computes the steps.

    Raises:
        ModelNotFound: there is no such model.
        ConfigError: a setting does not fit the model or the memory.
    """

    def __init__(
        self, model: str | Path, config: EngineConfig, *, make_runner: RunnerFactory = make_model_runner
    ) -> None:
        folder = resolve_model(model)
        self.config = config
        self.tokenizer = load_tokenizer(folder)
        self._runner = make_runner(folder, config)
        facts = self._runner.model_config
        num_blocks = config.cache.num_gpu_blocks_override or self._runner.profile_num_blocks()
        self.block_size = config.cache.block_size
        self.max_model_len = _fit_model_len(config, facts, num_blocks)
        self.model_context = facts.max_position_embeddings
        self.eos_token_ids = frozenset(facts.eos_token_ids)
        self.vocab_size = facts.vocab_size
        self._runner.allocate_kv_cache(num_blocks)
        self.fingerprint = self._runner.fingerprint
        """16 hexadecimal digits of a digest over weights, dtype, mode, kernels, instruction set and torch's version:
        deterministic engines that have it in common give the same tokens the same logits, bit for bit."""
        self._pool = BlockPool(num_blocks)
        self._cache = CacheManager(
            self._pool, self.block_size, enable_prefix_caching=config.cache.enable_prefix_caching
        )
        self._scheduler = Scheduler(config.scheduler, self._cache, make_policy(config.scheduler.scheduling_policy))
        self._pieces = Pieces(self.tokenizer) if self.tokenizer is not None else None
        self._generations: dict[str, Generation] = {}
        self._already_ended: list[StepOutput] = []
        self._seeds = random.Random(config.model.seed)
        self._num_arrivals = 0
        self.on_schedule: Callable[[ScheduledStep], None] | None = None
        """Gets each step before it runs, and must not keep it; on the thread that steps."""
        self._counts = _Counts()

    # -- requests --

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Tokens[int],
        params: SamplingParams,
        *,
        output_token_ids: Tokens[int] = (),
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> None:
        """Queue one sequence.

        Args:
            request_id: unique among the unfinished ones.
            prompt_token_ids: at least one token, at most `max_model_len - 1`.
            params: with `n` 1; several choices of one prompt are a group, see `add_group`.
            output_token_ids: what an earlier run of this request has generated. The next output is the token after
                them; if they reach the end already, it is that end without a token.
            priority: kept for policies that look at it.
            cache_salt: the prefix cache is shared only with sequences of the same salt.

        Raises:
            InvalidRequest: names what is wrong (a `ValueError`). The engine is unhurt.
            PromptTooLong: the prompt leaves no room for a new token.
        """
        siblings = (Sibling(request_id, params, output_token_ids),)
        self.add_group(prompt_token_ids, siblings, priority=priority, cache_salt=cache_salt)

    def add_group(
        self, prompt_token_ids: Tokens[int], siblings: Items[Sibling], *, priority: int = 0, cache_salt: bytes = b""
    ) -> None:
        """Queue the choices of one prompt: it is computed once, its blocks are shared, and a block that is not full is
        copied when they part. They are admitted, preempted and resumed together, and end one by one.

        Args:
            prompt_token_ids: as for `add_request`.
            siblings: at least one; all are added, or none.
            priority: as for `add_request`.
            cache_salt: as for `add_request`.

        Raises:
            InvalidRequest: names what is wrong (a `ValueError`). The engine is unhurt.
            PromptTooLong: the prompt leaves no room for a new token.
        """
        for _ in self.adding_group(prompt_token_ids, siblings, priority=priority, cache_salt=cache_salt):
            pass

    def adding_group(
        self, prompt_token_ids: Tokens[int], siblings: Items[Sibling], *, priority: int = 0, cache_salt: bytes = b""
    ) -> Iterator[None]:
        """Do `add_group` in parts, between which steps may run: each takes at most REPLAY_TOKENS output tokens.

        The group is queued by the last one. Arguments and errors are those of `add_group`.
        """
        names = [sibling.request_id for sibling in siblings]
        if not names or len(set(names)) < len(names):
            raise InvalidRequest(f"siblings: given request ids {names}, expected at least one, and all different")
        first_arrival = self._num_arrivals
        self._num_arrivals += len(siblings)
        made: list[tuple[Generation, Taken | None]] = []
        for index, sibling in enumerate(siblings):
            made.append((yield from self._make_generation(prompt_token_ids, sibling, priority, first_arrival + index)))
        open_ones: list[Sequence] = []
        for generation, end in made:
            seq = generation.seq
            seq.cache_salt = cache_salt
            if end is None:
                self._generations[seq.seq_id] = generation
                open_ones.append(seq)
            else:
                ended = StepOutput(seq.seq_id, None, end.text, end.finish_reason, end.stop_reason)
                self._already_ended.append(ended)
        if open_ones:
            self._scheduler.add(*open_ones)

    def abort_request(self, request_id: str) -> None:
        """Drop a request and free its blocks; there will be no output. An unknown id is ignored."""
        self._already_ended = [output for output in self._already_ended if output.request_id != request_id]
        generation = self._generations.pop(request_id, None)
        if generation is not None:
            self._scheduler.abort(generation.seq)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._generations or self._already_ended)

    def draw_seed(self) -> int:
        """Draw a seed for a request that has none; the draws are a function of the engine's own seed."""
        return self._seeds.getrandbits(63)

    # -- steps --

    def step(self) -> list[StepOutput]:
        """Run one step: schedule, model, then text and ends. Return one output for each new token; [] when idle.

        What the runner raises comes through. The step can then be run again; no request has moved.
        """
        started = perf_counter()
        step = self._scheduler.schedule()
        scheduled = perf_counter()
        outputs, self._already_ended = self._already_ended, []
        if step.is_empty:
            if self._generations and not outputs:
                raise InvariantViolation(f"{len(self._generations)} requests wait and nothing can run")
            return outputs
        if self.on_schedule is not None:
            self.on_schedule(step)
        try:
            given = self._runner.execute(step)
        except BaseException:
            self._already_ended = outputs
            raise
        executed = perf_counter()
        sampled, token_ids = step.sampled(), given.token_ids
        if len(token_ids) != len(sampled):
            raise InvariantViolation(f"the runner gave {len(token_ids)} tokens for {len(sampled)} sequences")
        self._scheduler.advance(step, token_ids)
        advanced = perf_counter()
        outputs += self._take_tokens(sampled, given)
        self._counts.note(step, len(token_ids), scheduled - started + advanced - executed, perf_counter() - started)
        return outputs

    @property
    def num_preemptions(self) -> int:
        """Sequences that lost their blocks, since the start."""
        return self._scheduler.num_preemptions

    def stats(self) -> EngineStats:
        """A snapshot of load, cache and work done."""
        pool, counts = self._pool, self._counts
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_claimable_blocks=self._scheduler.num_claimable_blocks,
            num_cached_blocks=pool.num_cached,
            kv_utilization=1.0 - pool.num_free / pool.num_blocks,
            prefix_query_tokens=self._cache.num_query_tokens,
            prefix_hit_tokens=self._cache.num_hit_tokens,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=counts.num_steps,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_generated_tokens=counts.num_generated_tokens,
            last_step_s=counts.last_step_s,
            last_schedule_s=counts.last_schedule_s,
            total_step_s=counts.total_step_s,
            total_schedule_s=counts.total_schedule_s,
        )

    def fragmentation(self) -> float:
        """The share of the slots in referenced blocks that hold no token; O(running sequences), between two steps."""
        return self._cache.fragmentation(self._scheduler.running())

    def memory_bytes(self) -> Mapping[str, int]:
        """Bytes of the device's memory by use; empty for a runner without any."""
        return self._runner.memory_bytes() if isinstance(self._runner, Weighed) else {}

    def check_invariants(self) -> None:
        """Check the bookkeeping of blocks between two steps; O(blocks), so for tests and idle times.

        Raises:
            InvariantViolation: names the first contradiction.
        """
        sequences = list(self._scheduler.sequences())
        check_cache(self._pool, self.block_size, sequences, self._cache.copy_on_write)
        check_groups(sequences)
        if {seq.seq_id for seq in sequences} != self._generations.keys():
            raise InvariantViolation("the scheduler's sequences are not the engine's requests")
        if len(sequences) != self._scheduler.num_running + self._scheduler.num_waiting:
            raise InvariantViolation("the scheduler's counts do not match its sequences")

    # -- inside --

    def _take_tokens(self, sampled: list[Sequence], given: SampledTokens) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        ended: list[Sequence] = []
        for seq, token_id in zip(sampled, given.token_ids, strict=True):
            try:
                text, finish, stop = self._generations[seq.seq_id].take(token_id, seq.num_output_tokens)
                error = None
            except Exception as caught:  # noqa: BLE001 - what one request's text raises must not fail its neighbours
                _log.exception("request %s failed", seq.seq_id)
                text, finish, stop, error = "", "error", None, f"{type(caught).__name__}: {caught}"
            outputs.append(StepOutput(seq.seq_id, token_id, text, finish, stop, seq.num_cached_tokens, error))
            if finish is not None:
                ended.append(seq)
                del self._generations[seq.seq_id]
        for place, ranked in given.logprobs.items():
            outputs[place].logprobs = tuple(map(self._with_text, ranked))
        self._scheduler.retire(ended)
        return outputs

    def _with_text(self, token: RankedToken) -> TokenLogprob:
        return TokenLogprob(*token, self._pieces.shown(token.token_id) if self._pieces is not None else "")

    def _make_generation(
        self, prompt: Tokens[int], sibling: Sibling, priority: int, arrival: int
    ) -> Generator[None, None, tuple[Generation, Taken | None]]:
        """Return a new sequence with its text up to now, and its end where it has ended; yield between parts."""
        params, outputs = sibling.params, sibling.output_token_ids
        self._check_request(sibling.request_id, prompt, outputs, params)
        seq = self._make_sequence(prompt, sibling, priority, arrival)
        try:
            generation = Generation(seq, _make_detokenizer(self._pieces, prompt, params), self.eos_token_ids)
            num_taken, end = yield from _replayed(generation, outputs)
        except Exception as error:
            raise InvalidRequest(
                f"tokens: given ids that the tokenizer can't make text of, expected ids of its vocabulary: {error}"
            ) from error
        if num_taken < len(outputs):
            raise InvalidRequest(
                f"output_token_ids: given {len(outputs)} tokens, expected at most {num_taken}, "
                "where the output ends by its parameters; resume with the parameters of the first run"
            )
        return generation, end

    def _make_sequence(self, prompt: Tokens[int], sibling: Sibling, priority: int, arrival: int) -> Sequence:
        params = sibling.params
        max_total_tokens = self.max_model_len
        if params.max_tokens is not None:
            max_total_tokens = min(max_total_tokens, len(prompt) + params.max_tokens)
        end_token_ids = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            end_token_ids |= self.eos_token_ids
        return Sequence(
            sibling.request_id,
            prompt,
            params,
            seed=params.seed if params.seed is not None else self.draw_seed(),
            arrival=arrival,
            max_total_tokens=max_total_tokens,
            output_token_ids=sibling.output_token_ids,
            priority=priority,
            end_token_ids=end_token_ids,
        )

    def _check_request(
        self, request_id: str, prompt: Tokens[int], outputs: Tokens[int], params: SamplingParams
    ) -> None:
        if request_id in self._generations:
            raise InvalidRequest(f"request_id: given {request_id!r}, which is running; expected a new one")
        if params.n != 1:
            raise InvalidRequest(f"n: given {params.n}, expected 1; add several choices with add_group")
        self._check_params(params)
        if params.stop_strings and self.tokenizer is None:
            raise InvalidRequest(
                "stop: given strings, expected none without a tokenizer.json in the model folder; use stop_token_ids"
            )
        self._check_tokens("prompt_token_ids", prompt)
        self._check_tokens("output_token_ids", outputs)
        if not prompt:
            raise InvalidRequest("prompt: given no tokens, expected at least one")
        if len(prompt) >= self.max_model_len:
            raise PromptTooLong(len(prompt), self.max_model_len)

    def _check_params(self, params: SamplingParams) -> None:
        if params.best_of not in (None, 1):
            raise InvalidRequest(f"best_of: given {params.best_of}, expected n (1); only LLM.generate chooses the best")
        most = self.config.model.max_logprobs
        if params.logprobs is not None and most != ALL_LOGPROBS and not 0 <= params.logprobs <= most:
            raise InvalidRequest(
                f"logprobs: given {params.logprobs}, expected at most {most}; a higher max_logprobs (-1 for no limit) "
                "allows more"
            )
        beyond = sorted(token_id for token_id in params.logit_bias or () if token_id >= self.vocab_size)
        if beyond:
            raise InvalidRequest(
                f"logit_bias: given token {beyond[0]}, expected 0 to {self.vocab_size - 1}, the vocabulary"
            )

    def _check_tokens(self, field: str, token_ids: Tokens[int]) -> None:
        try:
            low, high = min(array("q", token_ids), default=0), max(token_ids, default=0)
        except (TypeError, OverflowError) as error:
            raise InvalidRequest(f"{field}: given {token_ids!r:.80}, expected whole numbers: {error}") from error
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"{field}: given token {wrong}, expected 0 to {self.vocab_size - 1}, the vocabulary")


class _Counts:
    """What the engine has done since its start."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.last_step_s = 0.0
        self.last_schedule_s = 0.0
        self.total_step_s = 0.0
        self.total_schedule_s = 0.0

    def note(self, step: ScheduledStep, num_sampled: int, schedule_s: float, step_s: float) -> None:
        self.num_steps += 1
        self.num_prompt_tokens += sum(chunk.num_new_tokens for chunk in step.prefills)
        self.num_generated_tokens += num_sampled
        self.last_step_s = step_s
        self.last_schedule_s = schedule_s
        self.total_step_s += step_s
        self.total_schedule_s += schedule_s


def _make_detokenizer(
    pieces: Pieces | None, prompt: Tokens[int], params: SamplingParams
) -> IncrementalDetokenizer | None:
    if pieces is None:
        return None
    return IncrementalDetokenizer(pieces, prompt, skip_special_tokens=params.skip_special_tokens)


def _replayed(generation: Generation, outputs: Tokens[int]) -> Generator[None, None, tuple[int, Taken | None]]:
    """Do Generation.replay in parts of REPLAY_TOKENS."""
    if len(outputs) <= REPLAY_TOKENS:
        result = generation.replay(outputs)
        yield
        return result
    for index, token_id in enumerate(outputs):
        taken = generation.take(token_id, index + 1)
        if taken.finish_reason is not None:
            return index + 1, taken
        if index % REPLAY_TOKENS == 0:
            yield
    return len(outputs), None


def _fit_model_len(config: EngineConfig, facts: ModelFacts, num_blocks: int) -> int:
    """The longest sequence: what was asked for, or what model and pool allow. One sequence alone must always fit."""
    asked, of_model, of_pool = (
        config.model.max_model_len,
        facts.max_position_embeddings,
        num_blocks * config.cache.block_size,
    )
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
