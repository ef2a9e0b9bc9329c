from pagestream_worker.requests.claim_budget import UNLIMITED_TOKENS, ClaimBudget

STEP_TOKENS, BLOCK, MOST, BLOCKS = 128, 16, 8, 100


def new_budget() -> ClaimBudget:
    return ClaimBudget(block_size=BLOCK, max_num_seqs=MOST, step_tokens=STEP_TOKENS)


def test_an_idle_engine_may_claim_one_request_of_any_size() -> None:
    assert new_budget().available(BLOCKS) == (1, UNLIMITED_TOKENS)


def test_tokens_without_blocks_are_reserved_for_the_sequences_that_were_claimed() -> None:
    budget = new_budget()
    budget.reserve(20, [("a", 0), ("b", 4)])
    assert budget.available(BLOCKS)[1] == BLOCKS * BLOCK - 20 - (BLOCK + 4)
    assert budget.is_prefilling("a")
    assert budget.note_token("a")
    assert not budget.note_token("a")
    assert budget.available(BLOCKS)[1] == BLOCKS * BLOCK - (BLOCK + 4)


def test_nothing_is_claimed_while_a_whole_step_waits_here() -> None:
    budget = new_budget()
    budget.reserve(STEP_TOKENS + 30, [("a", 0)])
    assert budget.available(BLOCKS) == (0, 0)
    assert not budget.changed.is_set()
    budget.note_prefill_step({"a": 30, "gone": 5})
    assert budget.changed.is_set()
    assert budget.available(BLOCKS)[0] >= 1
    budget.note_token("a")
    assert not budget.has_prefilling


def test_the_mean_size_of_requests_and_max_num_seqs_bound_a_claim() -> None:
    budget = new_budget()
    for number in range(MOST - 1):
        budget.reserve(1, [(str(number), 0)])
        budget.note_token(str(number))
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
    assert budget.available(BLOCKS)[1] == BLOCKS * BLOCK - 10
