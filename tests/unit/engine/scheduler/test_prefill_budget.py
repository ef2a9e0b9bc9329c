"""The size of prompts' chunks beside decodes, against a machine whose times are known."""

import random
from collections.abc import Callable

import pytest
from pagestream_engine.config import SchedulerConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import TokenSequence
from pagestream_engine.scheduler.prefill_budget import LEAST_TOKENS, LOOK_EVERY, PrefillBudget
from pagestream_engine.scheduler.scheduled_step import ScheduledSequence, ScheduledStep

BUDGET = 2048
DECODE_S = 0.025
NUM_DECODES = 32


def sequence(num_tokens: int = 1) -> TokenSequence:
    return TokenSequence("s", [0] * num_tokens, SamplingParams(), seed=0, arrival=0, max_total_tokens=99)


def step_of(num_decodes: int, num_tokens: int) -> ScheduledStep:
    decodes = [ScheduledSequence(sequence(), 1, needs_sample=True)] * num_decodes
    prefills = [ScheduledSequence(sequence(), num_tokens, needs_sample=False)] if num_tokens else []
    return ScheduledStep(prefills=prefills, decodes=decodes)


def compute_prompt(
    budget: PrefillBudget, num_tokens: int, step_s: Callable[[int, int], float], *, num_ahead: int = 0
) -> tuple[list[float], list[int]]:
    """Compute a prompt beside decodes; return each step's seconds and prompt tokens.

    Args:
        budget: sizes the chunks; gets each step's time `num_ahead` steps later.
        num_tokens: of the prompt.
        step_s: seconds of a step by the tokens before its chunk, and those of the chunk.
        num_ahead: steps that are sized before a step's time is known.
    """
    computed, times, chunks, in_flight = 0, list[float](), list[int](), list[tuple[int, float]]()
    while computed < num_tokens:
        chunk = min(budget.limit(NUM_DECODES, BUDGET), num_tokens - computed)
        in_flight.append((chunk, step_s(computed, chunk)))
        computed += chunk
        times.append(in_flight[-1][1])
        chunks.append(chunk)
        if len(in_flight) > num_ahead:
            done, seconds = in_flight.pop(0)
            budget.note(step_of(NUM_DECODES, done), seconds)
    return times, chunks


def with_growing_attention(context: int, chunk: int) -> float:
    return DECODE_S + chunk * (90e-6 + context * 30e-9)


@pytest.mark.parametrize("num_ahead", [0, 1])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_steps_keep_the_bound_and_use_it(num_ahead: int, noise: float) -> None:
    bound_s, drawn = 2 * DECODE_S, random.Random(0)
    budget = PrefillBudget(bound_s)
    for _ in range(10):
        budget.note(step_of(NUM_DECODES, 0), DECODE_S)

    def step_s(context: int, chunk: int) -> float:
        return with_growing_attention(context, chunk) * (1 + noise * drawn.random())

    times, chunks = compute_prompt(budget, 32_000, step_s, num_ahead=num_ahead)
    assert sorted(times)[int(0.99 * len(times))] <= 1.3 * bound_s
    mixed = [seconds for seconds, chunk in zip(times, chunks, strict=True) if chunk]
    assert sum(mixed) / len(mixed) >= 0.85 * bound_s


def test_decodes_that_get_slower_meanwhile_are_seen() -> None:
    """Their time is not charged to the prompt's tokens for ever, which would leave it the least of all steps."""
    bound_s, slow_s = 4 * DECODE_S, 2 * DECODE_S
    budget = PrefillBudget(bound_s)
    budget.note(step_of(NUM_DECODES, 0), DECODE_S)
    _, chunks = compute_prompt(budget, 100_000, lambda _, chunk: slow_s + chunk * 1e-4)
    assert chunks.count(0) >= len(chunks) // (LOOK_EVERY + 2)
    last = [chunk for chunk in chunks[-40:-1] if chunk]
    assert sum(last) / len(last) == pytest.approx((bound_s - slow_s) / 1e-4, rel=0.15)


def test_prompts_get_on_where_decodes_take_longer_than_the_bound() -> None:
    budget = PrefillBudget(DECODE_S / 2)
    budget.note(step_of(NUM_DECODES, 0), DECODE_S)
    _, chunks = compute_prompt(budget, 4000, with_growing_attention)
    assert set(chunks[1:-1]) <= {0, LEAST_TOKENS}


def test_one_late_step_does_not_shrink_the_chunks_for_long() -> None:
    budget = PrefillBudget(2 * DECODE_S)
    budget.note(step_of(NUM_DECODES, 0), DECODE_S)
    compute_prompt(budget, 20_000, lambda _, chunk: DECODE_S + chunk * 1e-4)
    usual = budget.limit(NUM_DECODES, BUDGET)
    budget.note(step_of(NUM_DECODES, usual), 10 * DECODE_S)
    _, chunks = compute_prompt(budget, 20_000, lambda _, chunk: DECODE_S + chunk * 1e-4)
    assert next(place for place, chunk in enumerate(chunks) if chunk >= 0.9 * usual) <= 30


@pytest.mark.parametrize(("bound_s", "num_decodes"), [(None, 8), (0.001, 0)])
def test_there_is_no_limit_without_a_bound_or_without_decodes(bound_s: float | None, num_decodes: int) -> None:
    budget = PrefillBudget(bound_s)
    budget.note(step_of(8, 100), 1.0)
    assert budget.limit(num_decodes, BUDGET) == BUDGET


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan"), True, "50"])
def test_a_bound_that_is_none_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="itl_bound_ms"):
        SchedulerConfig(itl_bound_ms=wrong)  # type: ignore[arg-type]
