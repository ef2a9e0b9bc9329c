"""The size of prompts' chunks beside decodes, against a machine whose times are known."""

import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from pagestream_engine import ConfigError, Engine, EngineConfig, SamplingParams, SchedulerConfig, Sequence
from pagestream_engine.plan import ScheduledSequence, ScheduledStep
from pagestream_engine.scheduler import LEAST_SHARE, LOOK_EVERY, PrefillBudget, RestoreCost
from support.engines.cached_sequences import make_seq

BUDGET = 2048
DECODE_S = 0.02
NUM_DECODES = 32


def decodes(count: int) -> list[ScheduledSequence]:
    seq = Sequence("d", [0], SamplingParams(), seed=0, arrival=0, max_total_tokens=99)
    return [ScheduledSequence(seq, 1, needs_sample=True)] * count


class Machine:
    """Computes one long prompt beside decodes, in steps whose seconds are known.

    Args:
        budget: sizes the chunks.
        num_ahead: steps that are sized before a step's time is known.
        noise: a step takes up to this share longer.
    """

    def __init__(self, budget: PrefillBudget, *, num_ahead: int = 0, noise: float = 0.0) -> None:
        self.decode_s = DECODE_S
        self.token_s, self.pair_s, self.chunk_s, self.context_s = 0.5e-3, 0.15e-6, 1e-3, 0.8e-6
        self.times: list[float] = []
        self.chunks: list[int] = []
        self._budget = budget
        self._num_ahead = num_ahead
        self._noise, self._random = noise, random.Random(0)
        self._seq = Sequence("p", [0], SamplingParams(), seed=0, arrival=0, max_total_tokens=10**6)
        self._in_flight: list[tuple[ScheduledStep, float]] = []

    def seconds(self, context: int, chunk: int) -> float:
        """What a step takes."""
        tokens_s = chunk * (self.token_s + self.pair_s * (context + chunk / 2))
        prompt_s = self.chunk_s + self.context_s * context + tokens_s
        return (self.decode_s + prompt_s * (chunk > 0)) * (1 + self._noise * self._random.random())

    def step(self, context: int, most: int, *, late: float = 1.0) -> int:
        """Run one; return its prompt tokens."""
        chunk = min(self._budget.begin(NUM_DECODES, BUDGET).limit(context), most)
        entries = [ScheduledSequence(self._seq, chunk, needs_sample=False)] if chunk else []
        self._in_flight.append((ScheduledStep(entries, decodes(NUM_DECODES)), late * self.seconds(context, chunk)))
        self.times.append(self._in_flight[-1][1])
        self.chunks.append(chunk)
        if len(self._in_flight) > self._num_ahead:
            done, seconds = self._in_flight.pop(0)
            self._seq.num_computed_tokens += sum(entry.num_scheduled_tokens for entry in done.prefills)
            self._budget.note(done, seconds)
        return chunk

    def decode(self, num_steps: int = 10) -> None:
        """Run steps without a prompt."""
        for _ in range(num_steps):
            self.step(0, 0)
        self.times.clear()
        self.chunks.clear()

    def compute(self, num_tokens: int) -> None:
        """Run the steps of a prompt."""
        self._seq.num_computed_tokens = computed = 0
        while computed < num_tokens:
            computed += self.step(computed, num_tokens - computed)

    def settled(self) -> list[float]:
        """Times of the steps with prompts, but for the first ones and the last."""
        steps = list(zip(self.times, self.chunks, strict=True))
        return [seconds for seconds, chunk in steps[8:-1] if chunk]


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_steps_keep_the_bound_and_use_it(num_ahead: int, noise: float) -> None:
    """Although a chunk costs more with each one before it: by itself, and for each of its tokens."""
    bound_s, budget = 2 * DECODE_S, PrefillBudget(2 * DECODE_S)
    machine = Machine(budget, num_ahead=num_ahead, noise=noise)
    machine.decode()
    machine.compute(8_000)
    assert sorted(machine.times)[int(0.99 * len(machine.times))] <= (1.15 + noise) * bound_s
    assert fmean(machine.settled()) == pytest.approx(bound_s, rel=0.1)


def test_chunks_of_later_prompts_begin_where_they_fit() -> None:
    """What a context costs was learnt with a long one: the next prompt's first steps are neither short nor late."""
    bound_s = 2 * DECODE_S
    machine = Machine(PrefillBudget(bound_s), noise=0.1)
    machine.decode()
    machine.compute(8_000)
    machine.decode(100)
    machine.compute(600)
    assert fmean(machine.times[:10]) == pytest.approx(bound_s, rel=0.3)
    assert max(machine.times) <= 1.5 * bound_s


def test_prompts_get_on_by_a_share_where_the_bound_cannot_be_kept() -> None:
    machine = Machine(PrefillBudget(DECODE_S / 2))
    machine.decode()
    machine.compute(8_000)
    contexts = [sum(machine.chunks[:place]) for place in range(len(machine.chunks))]
    over = [
        seconds / (machine.decode_s + machine.chunk_s + machine.context_s * context) - 1
        for seconds, chunk, context in list(zip(machine.times, machine.chunks, contexts, strict=True))[8:-1]
        if chunk
    ]
    assert fmean(over) == pytest.approx(LEAST_SHARE, rel=0.15)
    assert max(over) <= 1.5 * LEAST_SHARE


def test_decodes_that_get_slower_meanwhile_are_seen() -> None:
    bound_s = 4 * DECODE_S
    machine = Machine(PrefillBudget(bound_s))
    machine.decode()
    machine.decode_s = 2 * DECODE_S
    machine.compute(20_000)
    assert machine.chunks.count(0) >= len(machine.chunks) // (LOOK_EVERY + 2)
    assert fmean(machine.settled()[-100:]) == pytest.approx(bound_s, rel=0.1)


def test_one_late_step_does_not_shrink_the_chunks_for_long() -> None:
    machine = Machine(PrefillBudget(2 * DECODE_S))
    machine.decode()
    machine.compute(4_000)
    usual = machine.step(4_000, BUDGET)
    machine.step(4_000 + usual, BUDGET, late=20.0)
    chunks = [machine.step(4_000 + 2 * usual, BUDGET) for _ in range(20)]
    assert next(place for place, chunk in enumerate(chunks) if chunk >= 0.9 * usual) <= 10


def test_chunks_of_one_step_share_its_time() -> None:
    """The first gets what fits; the next ones only what it leaves."""
    budget = PrefillBudget(2 * DECODE_S)
    machine = Machine(budget)
    machine.decode()
    machine.compute(1_000)
    step = budget.begin(NUM_DECODES, BUDGET)
    alone = step.limit(1_000)
    step.take(1_000, alone // 2)
    second = step.limit(1_000)
    step.take(1_000, second)
    assert 0 < second < 0.6 * alone
    assert step.limit(0) == 0


def test_there_is_no_limit_without_decodes() -> None:
    budget = PrefillBudget(0.001)
    budget.note(ScheduledStep(decodes=decodes(8)), 1.0)
    assert budget.begin(0, BUDGET).limit(5_000) == BUDGET


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan"), True, "50"])
def test_a_bound_that_is_none_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="itl_bound_ms"):
        SchedulerConfig(itl_bound_ms=wrong)  # type: ignore[arg-type]


def test_a_step_that_prompts_made_no_longer_leaves_all_tokens_to_the_next_chunk() -> None:
    """As where other load hides what a prompt costs: the model of step times has a prompt's token for nothing."""
    budget = PrefillBudget(1.0)
    seq = Sequence("p", [0] * 64, SamplingParams(), seed=0, arrival=0, max_total_tokens=99)
    for _ in range(8):
        budget.note(ScheduledStep([], decodes(4)), 0.002)
        budget.note(ScheduledStep([ScheduledSequence(seq, 16, needs_sample=False)], decodes(4)), 0.002)
    chunks = budget.begin(4, BUDGET)
    num_tokens = chunks.num_tokens
    chunks.take(0, 16)
    assert chunks.limit(0) == num_tokens - 16


def step(num_prompt_tokens: int, num_decodes: int = 0) -> ScheduledStep:
    seq = make_seq([1] * 200)
    prefills = [ScheduledSequence(seq, num_prompt_tokens, needs_sample=False)] if num_prompt_tokens else []
    return ScheduledStep(prefills, [ScheduledSequence(seq, 1, needs_sample=True)] * num_decodes)


def test_the_cheaper_way_is_chosen_by_what_was_measured() -> None:
    cost = RestoreCost(load_page_s=0.010)
    assert cost.pays(1, 16), "nothing was computed yet"
    cost.note(step(0, num_decodes=4), 9.0)
    assert cost.pays(1, 16), "decodes tell nothing of prompts"
    cost.note(step(100), 0.05)
    assert not cost.pays(1, 16), "16 tokens take 8 ms"
    assert cost.pays(1, 21)
    cost.note(step(4, num_decodes=4), 99.0)
    assert not cost.pays(1, 16)
    for _ in range(100):
        cost.note(step(100), 0.1)
    assert cost.pays(1, 16), "the machine got slower: 16 ms"
    assert not cost.pays(2, 16)


@pytest.mark.parametrize(("options", "expected"), [({"prefill_spread_steps": 4}, 2), ({}, 1)])
def test_an_engine_spreads_prompts_where_it_is_told_to(
    model_of: Callable[..., Path], options: dict[str, int], expected: int
) -> None:
    engine = Engine(model_of("llama", max_position_embeddings=2048), EngineConfig.from_options(options))
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    engine.add_request("runs", [3], params)
    engine.step()
    engine.add_request("comes", [5 + number % 40 for number in range(800)], params)
    num_steps = 1
    while not any(output.seq_id == "comes" for output in engine.step()):
        num_steps += 1
    assert num_steps == expected
