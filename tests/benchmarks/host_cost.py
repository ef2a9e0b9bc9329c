"""Host time of a decode step: everything but the model, with many running sequences and long contexts.

    PYTHONPATH=tests python tests/benchmarks/host_cost.py [--short] [--profile]

CPU time of `Engine.step` with two steps in flight, whose runner edits and reads the persistent batch as `ModelRunner`
does but has no model: its tokens are made up. It has five parts:

* schedule: the scheduler's `schedule`;
* record: the step's limit, its `StepPlan`, placeholders;
* batch: the plan's edits of the persistent batch, and the inputs of a forward pass, copies of block tables included;
* result: the sampled tokens into the batch, and the `StepResult`;
* tokens: bookkeeping of sampled tokens, block hashes, text, stop checks and outputs.

A sixth part, "append", is the worker's: from the step's report to the arguments of append.lua, with the log entries and
their digests. The worker runs the engine in a process of its own, so that this part runs beside the next step, in
another process: both sums are printed, with it and without.

Not in it: the model and its launches, the attention backend's metadata, and the sampler (its rows are edited when a
sequence comes and goes). Printed beside it: what packing the report costs the engine's process, and what the pipe of an
executor process adds on the core's side and on its own.

Only steps in which every sequence decodes are counted. A sixteenth of the sequences gets a block in each. Text is one
ASCII character a token.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import pstats
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from time import thread_time

import msgspec
import torch
from goals import print_goal
from pagestream_engine import Engine, EngineConfig, SamplingParams, SequenceOutput
from pagestream_engine.plan import PendingResult, ScheduledStep, StepPlan, StepResult
from pagestream_engine.runner.batch import PersistentBatch, pending_result
from pagestream_engine.sampler import Sampled
from pagestream_engine.stats import EngineStats
from pagestream_engine.wire.executor import ANSWERS, PLANS
from pagestream_engine.wire.worker import REPORTS, AddGroup, Figures, StepDone
from pagestream_streams import AppendKind, AppendOutcome
from pagestream_streams.engine.session import append_arguments, slice_of
from pagestream_streams.protocol.records import TokenOutcomes
from pagestream_worker.core_process import PlainSequences, spare_what_lives
from scheduler_step import make_tokenizer
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder
from support.engines.request_table import RequestTable, claim

CASES = ((256, 1024), (256, 4096), (256, 32768), (1024, 1024))
"""Running sequences, tokens of context."""
LIMITS_MS = {256: 1.0, 1024: 3.0}
NUM_CHARACTERS = 94
"""Ids of the tokenizer that are printable ASCII."""
BLOCK_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 65536
WARM_UP_STEPS = 20
NONCE = "abcdef0123456789"
RETENTION_MS = 3_600_000
APPEND_LIMIT = 256
FACTS = ArithmeticFacts(vocab_size=256, max_position_embeddings=1 << 20)


class BatchRunner(ArithmeticRunner):
    """Keeps the persistent batch of a real runner, and makes up the tokens: a function of row and plan."""

    def __init__(self, config: EngineConfig, max_model_len: int, facts: ArithmeticFacts = FACTS) -> None:
        super().__init__(config, facts)
        self.plan: StepPlan | None = None
        """The last one."""
        self.batch = self._new_batch(max_model_len)
        self._max_model_len = max_model_len

    @property
    def launches_ahead(self) -> bool:
        return True

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate nothing: no step reads it."""

    def execute(self, plan: StepPlan) -> PendingResult:
        sampled_rows = self.edit_batch(plan)
        return self.give_tokens(plan, sampled_rows)

    def edit_batch(self, plan: StepPlan) -> torch.Tensor:
        """Edit the batch and make the inputs of a forward pass. Return the rows that get a token."""
        if plan.reset:
            self.batch = self._new_batch(self._max_model_len)
        self.plan = plan
        self.batch.apply(plan)
        return self.batch.inputs(plan).sampled_rows

    def give_tokens(self, plan: StepPlan, sampled_rows: torch.Tensor) -> PendingResult:
        """Write a token of each sampled row into the batch. Return the result."""
        if not len(plan.sampled_rows):
            return pending_result(plan.step_id, None)
        token_ids = self.next_token_ids(plan, sampled_rows)
        self.batch.next_tokens.index_copy_(0, sampled_rows, token_ids)
        return pending_result(plan.step_id, Sampled(token_ids, torch.zeros(len(token_ids))))

    def next_token_ids(self, plan: StepPlan, sampled_rows: torch.Tensor) -> torch.Tensor:
        """Return a token for each sampled row."""
        return (sampled_rows + plan.step_id) % NUM_CHARACTERS

    def _new_batch(self, max_model_len: int) -> PersistentBatch:
        sizes = [group.block_size for group in self.kv_layout.groups]
        return PersistentBatch(self._config.scheduler.max_num_seqs, max_model_len, sizes, torch.device("cpu"))


@dataclass
class StepTimes:
    """CPU time of a step's parts in ms."""

    schedule: float = 0.0
    record: float = 0.0
    batch: float = 0.0
    result: float = 0.0
    tokens: float = 0.0

    @property
    def total(self) -> float:
        return self.schedule + self.record + self.batch + self.result + self.tokens


class TimedRunner(BatchRunner):
    """Notes when its parts of a step begin and end."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        self.entered = self.edited = self.left = self.resulting_s = 0.0
        self.last_result: StepResult | None = None

    def execute(self, plan: StepPlan) -> PendingResult:
        self.entered = thread_time()
        sampled_rows = self.edit_batch(plan)
        self.edited = thread_time()
        pending = self.give_tokens(plan, sampled_rows)
        self.left = thread_time()
        return lambda: self._wait(pending)

    def _wait(self, pending: PendingResult) -> StepResult:
        started = thread_time()
        result = self.last_result = pending()
        self.resulting_s = thread_time() - started
        return result


class Workload:
    """An engine in which `num_running` sequences of about `context` tokens decode."""

    def __init__(self, num_running: int, context: int, num_steps: int) -> None:
        # The sequences that come first decode while the others' prompts are computed.
        num_prefill_steps = 2 * -(-num_running * context // MAX_NUM_BATCHED_TOKENS)
        max_model_len = context + num_prefill_steps + WARM_UP_STEPS + num_steps + BLOCK_SIZE
        config = EngineConfig.from_options(
            {
                "max_num_seqs": num_running,
                "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
                "max_model_len": max_model_len,
                "num_gpu_blocks_override": num_running * (max_model_len // BLOCK_SIZE + 2),
                "async_scheduling": True,
            }
        )
        self.num_running = num_running
        self.runner = TimedRunner(config, max_model_len)
        self.outputs: Sequence[SequenceOutput] = ()
        """Of the last step."""
        self._num_decodes = 0
        self._scheduled = 0.0
        with tempfile.TemporaryDirectory() as folder:
            model = make_folder(Path(folder), make_tokenizer())
            self.engine = Engine(model, config, make_runner=lambda _folder, _config: self.runner)
        self.engine.on_schedule = self._note_schedule
        self._add_requests(context)
        while self._num_decodes < num_running:
            self.engine.step()
        for _ in range(WARM_UP_STEPS):
            self.engine.step()

    def step(self) -> StepTimes | None:
        """Run a step. Return its times; None where not all sequences took part in it."""
        runner = self.runner
        self._num_decodes = 0
        started = thread_time()
        self.outputs = outputs = self.engine.step()
        ended = thread_time()
        if self._num_decodes < self.num_running or len(outputs) < self.num_running:
            return None
        seconds = (
            self._scheduled - started,
            runner.entered - self._scheduled,
            runner.edited - runner.entered,
            runner.left - runner.edited + runner.resulting_s,
            ended - runner.left - runner.resulting_s,
        )
        return StepTimes(*(each * 1e3 for each in seconds))

    def _note_schedule(self, step: ScheduledStep) -> None:
        self._scheduled = thread_time()
        self._num_decodes = 0 if step.prefills else len(step.decodes)

    def _add_requests(self, context: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        for number in range(self.num_running):
            # No common prefix, and different places within a block.
            head = [number % FACTS.vocab_size, number // FACTS.vocab_size]
            prompt = head + [5] * (context - len(head) - number % BLOCK_SIZE)
            self.engine.add_request(str(number), prompt, params)


def mean_ms(action: Callable[[], object], repeats: int = 50) -> float:
    """Return the mean CPU time of an action in ms."""
    started = thread_time()
    for _ in range(repeats):
        action()
    return (thread_time() - started) / repeats * 1e3


async def append_ms(outputs: Sequence[SequenceOutput], stats: EngineStats, num_steps: int) -> tuple[float, float]:
    """Return what a step's report costs the engine's process, and the worker up to the arguments of append.lua.

    Args:
        outputs: of one step, taken anew in each.
        stats: the engine's.
        num_steps: so many after the first.
    """
    table = RequestTable(memory_bytes=1 << 30)
    named = []
    for number, output in enumerate(outputs):
        request_id = f"2a97516c-0001-{number:032x}"
        table.requests.start(claim(NONCE, request_id=request_id))
        named.append(msgspec.structs.replace(output, seq_id=f"{request_id}/{NONCE}/0"))
    figures = Figures(stats, 0.01, None, 5, is_busy=True)
    plain = PlainSequences()
    for output, command in zip(named, table.commands, strict=True):
        if isinstance(command, AddGroup) and command.log_handle:
            plain.add(output.seq_id, command.log_handle)
    packing, appending = [], []
    for step in range(1 + num_steps):
        started = thread_time()
        tokens, others = plain.split(named)
        message = REPORTS.encode(StepDone(others, 0.01, len(named), has_prompts=False, figures=figures, tokens=tokens))
        packed = thread_time()
        report = REPORTS.decode(message)
        table.requests.take_outputs(report.outputs, report.tokens)
        table.requests.take_deferred()
        pending = table.requests.pending(APPEND_LIMIT)
        if pending.appends:
            append_arguments(RETENTION_MS, {"": pending.appends}, channels="wake:", make_slice=slice_of)
        appending.append(thread_time() - packed)
        packing.append(packed - started)
        for each in pending.appends:
            outcome = AppendOutcome(AppendKind.OK, each.first_index + len(each.entries))
            table.requests.apply_outcome(each, outcome)
        for batch in pending.logs.batches:
            table.requests.apply_token_outcomes(batch, TokenOutcomes([step + 1] * len(batch.logs), {}))
    return fmean(packing[1:]) * 1e3, fmean(appending[1:]) * 1e3


def pipe_ms(workload: Workload) -> tuple[float, float]:
    """Return what the pipe's codec costs the core's side of a step, and the executor's."""
    plan, result = workload.runner.plan, workload.runner.last_result
    sent, returned = PLANS.encode(plan), ANSWERS.encode(result)
    core = mean_ms(lambda: PLANS.encode(plan)) + mean_ms(lambda: ANSWERS.decode(returned))
    executor = mean_ms(lambda: PLANS.decode(sent)) + mean_ms(lambda: ANSWERS.encode(result))
    return core, executor


def measure(num_running: int, context: int, num_steps: int, *, profile: bool) -> None:
    """Print the times of one case."""
    workload = Workload(num_running, context, num_steps)
    gc.collect()
    profiler = cProfile.Profile(thread_time)
    if profile:
        profiler.enable()
    times = [each for each in (workload.step() for _ in range(num_steps)) if each is not None]
    profiler.disable()
    if not times:
        raise RuntimeError(f"none of {num_steps} steps ran all {num_running} sequences")
    totals = [each.total for each in times]
    parts = " ".join(
        f"{name} {fmean(getattr(each, name) for each in times):.3f}"
        for name in ("schedule", "record", "batch", "result", "tokens")
    )
    core, executor = pipe_ms(workload)
    packing, appending = asyncio.run(append_ms(workload.outputs, workload.engine.stats(), num_steps))
    limit = LIMITS_MS[num_running]
    print(
        f"{num_running:5d} running, {context:6d} tokens: mean {fmean(totals):.3f} p50 {median(totals):.3f} "
        f"max {max(totals):.3f} ms ({len(times)} of {num_steps} steps); {parts}; "
        f"append {appending:.3f}, report {packing:.3f}; pipe {core:.3f} + {executor:.3f}",
        flush=True,
    )
    total = fmean(totals)
    what = f"host time of a step, {num_running} running, {context} tokens"
    print_goal(f"{what}, the engine's process", f"{limit} ms", f"{total:.2f} ms")
    print_goal(f"{what}, with the worker's append arguments", f"{limit} ms", f"{total + appending:.2f} ms")
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(14)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer steps, and no context of 32k")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--profile", action="store_true", help="print where the time goes; the times are higher then")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spare_what_lives()  # as both processes do
    with torch.inference_mode():
        for num_running, context in CASES:
            if options.short and context > 4096:
                continue
            measure(num_running, context, 20 if options.short else options.steps, profile=options.profile)
            gc.collect()


if __name__ == "__main__":
    main()
