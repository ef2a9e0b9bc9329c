import random

import pytest
from pagestream_engine import SchedulerConfig
from pagestream_engine.features.lora.scheduling import AdapterTurns
from pagestream_engine.kv_cache import BlockPool, CacheManager
from pagestream_engine.plan import KVLayout, KVSpec, full_attention, make_layout
from pagestream_engine.request import Sequence
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.scheduler import (
    MOST_PASSING,
    AdapterResidency,
    FirstComeFirstServed,
    RunningSequences,
    WaitingQueue,
)
from pagestream_engine.scheduler.admission import Admission
from pagestream_worker import UNLIMITED_TOKENS, ClaimBudget

STEP_TOKENS, BLOCK, MOST, BLOCKS = 128, 16, 8, 100


FULL, WINDOW = KVSpec(1, 1), KVSpec(1, 1, window=40)
LAYOUTS = {
    "full": (FULL,),
    "full and window": (FULL, WINDOW),
    "five windows to one": (*[WINDOW] * 5, FULL),
    "half as large": (KVSpec(2, 1), WINDOW),
    "windows alone": (WINDOW,),
}


def layout_of(name: str) -> KVLayout:
    return make_layout(LAYOUTS[name], BLOCK, 4096)


def new_budget(layout: KVLayout | None = None) -> ClaimBudget:
    return ClaimBudget(kv_layout=layout or full_attention(BLOCK), max_num_seqs=MOST, step_tokens=STEP_TOKENS)


def test_an_idle_engine_may_claim_one_request_of_any_size() -> None:
    assert new_budget().available(BLOCKS) == (1, UNLIMITED_TOKENS)


def test_blocks_are_reserved_for_the_sequences_that_were_claimed() -> None:
    budget = new_budget()
    budget.reserve(20, [("a", 0), ("b", 4)])
    assert budget.available(BLOCKS)[1] == (BLOCKS - 1 - 2 - 1) * BLOCK, "one is kept for the newcomer's growth"
    assert "a" in budget.prefilling
    budget.end_prefill("a")
    assert "a" not in budget.prefilling
    assert budget.available(BLOCKS)[1] == (BLOCKS - 1 - 1) * BLOCK


def test_nothing_is_claimed_while_a_whole_step_waits_here() -> None:
    budget = new_budget()
    budget.reserve(STEP_TOKENS + 30, [("a", 0)])
    assert budget.available(BLOCKS) == (0, 0)
    assert not budget.changed.is_set()
    budget.begin_prefills({"a": 30, "gone": 5})
    assert budget.changed.is_set()
    assert budget.available(BLOCKS)[0] >= 1
    budget.end_prefill("a")
    assert not budget.prefilling


def test_without_lookahead_nothing_is_claimed_until_all_have_a_token() -> None:
    budget = new_budget()
    budget.reserve(20, [("a", 0)])
    assert budget.available(BLOCKS)[0] >= 1
    budget.limit_lookahead(claims_ahead=False)
    budget.begin_prefills({"a": 0})
    assert budget.available(BLOCKS) == (0, 0)
    budget.end_prefill("a")
    assert budget.available(BLOCKS)[0] >= 1


@pytest.mark.parametrize("claims_ahead", [False, True])
def test_beams_are_counted_and_hold_up_no_claim_when_their_prompt_is_computed(*, claims_ahead: bool) -> None:
    budget = new_budget()
    budget.limit_lookahead(claims_ahead=claims_ahead)
    budget.reserve(20, [("a", 0), ("b", 0)], num_at_end=MOST - 1)
    assert budget.available(BLOCKS)[1] <= (BLOCKS - 1 - MOST + 1) * BLOCK, "each has a block of its own"
    budget.begin_prefills({"a": 0, "b": 0})
    assert budget.available(BLOCKS) == (1, (BLOCKS - 1) * BLOCK), "one seat is left, and all that is free"
    budget.release(["a", "b"])
    assert budget.available(BLOCKS) == (1, UNLIMITED_TOKENS)
    for number in range(MOST - 1):
        budget.reserve(1, [(str(number), 0)])
        budget.end_prefill(str(number))
    assert budget.available(BLOCKS)[0] == 1


def test_a_search_that_waits_for_all_its_seats_holds_up_a_bounded_number_of_claims() -> None:
    budget = new_budget()
    budget.reserve(1, [("stream", 0)])
    budget.end_prefill("stream")
    budget.reserve(4, [("search", 0)], num_at_end=MOST, is_search=True)
    for number in range(MOST_PASSING):
        assert budget.available(BLOCKS)[0] >= 1, "seven seats are free, of which the search can't use any"
        budget.reserve(1, [(str(number), 0)])
        budget.end_prefill(str(number))
        budget.release([str(number)])
    assert budget.available(BLOCKS) == (0, 0)
    budget.release(["stream"])
    budget.begin_prefills({"search": 0})
    assert budget.available(BLOCKS)[0] == 0, "it has all seats"
    budget.release(["search"])
    assert budget.available(BLOCKS)[0] == 1


def test_the_mean_size_of_requests_and_max_num_seqs_bound_a_claim() -> None:
    budget = new_budget()
    for number in range(MOST - 1):
        budget.reserve(1, [(str(number), 0)])
        budget.end_prefill(str(number))
    assert budget.available(BLOCKS)[0] == 1
    budget.release([str(number) for number in range(4)])
    assert 1 < budget.available(BLOCKS)[0] <= 5


def test_released_sequences_leave_nothing_reserved() -> None:
    budget = new_budget()
    budget.reserve(STEP_TOKENS + 30, [("a", 0), ("b", 0)])
    budget.release(["a", "b", "never there"])
    assert budget.changed.is_set()
    assert budget.available(BLOCKS) == (1, UNLIMITED_TOKENS)
    budget.reserve(10, [("c", 0)])
    assert budget.available(BLOCKS)[1] == (BLOCKS - 1 - 1) * BLOCK


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_claim_is_admitted_at_once_however_its_tokens_are_divided(name: str) -> None:
    """By the scheduler's own count of the blocks that each of its sequences takes, and of those that it keeps free."""
    dice, counts = random.Random(name), set()
    for _ in range(200):
        num_blocks, num_running = dice.randint(10, 300), dice.randint(1, MOST - 1)
        cache = CacheManager(BlockPool(num_blocks), layout_of(name), enable_prefix_caching=False)
        running, budget = RunningSequences(cache), new_budget(cache.layout)
        config = SchedulerConfig(max_num_seqs=MOST, max_num_batched_tokens=STEP_TOKENS)
        waiting = WaitingQueue(FirstComeFirstServed())
        turns = AdapterTurns(1, AdapterResidency(1), waiting, running)
        admission = Admission(config, cache, waiting, running, restore_cost=None, turns=turns, events=None)
        for number in range(num_running + dice.randint(0, 20)):  # the mean size of requests falls
            budget.reserve(8, [(str(number), 0)])
            budget.end_prefill(str(number))
        budget.release([str(number) for number in range(num_running, 30)])
        count, tokens = budget.available(num_blocks - admission.num_reserved_blocks(num_running))
        if tokens < count:
            continue
        counts.add(count)
        tokens = min(tokens, 2000)
        cuts = sorted(dice.sample(range(1, tokens), count - 1))
        wanted = 0
        for begin, end in zip([0, *cuts], [*cuts, tokens], strict=True):
            seq = Sequence(str(begin), [1] * (end - begin), SamplingParams(), seed=0, arrival=0, max_total_tokens=4096)
            wanted += admission.num_wanted_blocks(seq, running.get_computed_blocks(seq))
        assert wanted + admission.num_reserved_blocks(num_running + count - 1) <= num_blocks, (
            num_blocks,
            count,
            tokens,
        )
    assert {1, 2} <= counts


@pytest.mark.parametrize(("name", "least"), [("full", 1584), ("five windows to one", 600), ("windows alone", 10**6)])
def test_what_windows_leave_behind_is_not_counted(name: str, least: int) -> None:
    budget = new_budget(layout_of(name))
    budget.reserve(1, [("a", 0)])
    budget.end_prefill("a")
    assert budget.available(BLOCKS)[1] >= least


def test_siblings_share_full_attention_and_no_window() -> None:
    budget = new_budget(layout_of("full and window"))
    budget.reserve(64, [("a", 0), ("b", 0)])
    budget.end_prefill("a")
    left_by_b = budget.available(BLOCKS)[1]
    budget.end_prefill("b")
    # One block of each group for b's first token, and the prompt's four in its window.
    assert budget.available(BLOCKS)[1] == left_by_b + 6 * BLOCK
