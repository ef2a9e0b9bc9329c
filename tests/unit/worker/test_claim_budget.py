from pagestream_worker.claim_budget import ANY_NUMBER_OF_TOKENS, Seats

STEP_TOKENS, BLOCK, MOST, BLOCKS = 128, 16, 8, 100


def seats() -> Seats:
    return Seats(block_size=BLOCK, max_num_seqs=MOST, step_tokens=STEP_TOKENS)


def test_an_idle_engine_takes_one_request_of_any_size() -> None:
    assert seats().free(BLOCKS) == (1, ANY_NUMBER_OF_TOKENS)


def test_what_has_no_blocks_yet_is_promised_to_those_that_came() -> None:
    held = seats()
    held.take(20, [("a", 0), ("b", 4)])
    assert held.free(BLOCKS)[1] == BLOCKS * BLOCK - 20 - (BLOCK + 4)
    assert held.awaits_first_token("a")
    assert held.made_token("a")
    assert not held.made_token("a")
    assert held.free(BLOCKS)[1] == BLOCKS * BLOCK - (BLOCK + 4)


def test_nothing_is_taken_while_a_whole_step_waits_here() -> None:
    held = seats()
    held.take(STEP_TOKENS + 30, [("a", 0)])
    assert held.free(BLOCKS) == (0, 0)
    held.begin_step({"a": 30, "gone": 5})
    assert held.free(BLOCKS)[0] >= 1
    held.made_token("a")
    assert not held.await_first_tokens


def test_as_many_are_taken_as_usually_fit_and_no_more_than_there_are_seats() -> None:
    held = seats()
    for number in range(MOST - 1):
        held.take(1, [(str(number), 0)])
        held.made_token(str(number))
    assert held.free(BLOCKS)[0] == 1
    held.give_up([str(number) for number in range(4)])
    assert 1 < held.free(BLOCKS)[0] <= 5


def test_what_is_given_up_leaves_nothing_behind() -> None:
    held = seats()
    held.take(STEP_TOKENS + 30, [("a", 0), ("b", 0)])
    held.give_up(["a", "b", "never there"])
    assert held.free(BLOCKS) == (1, ANY_NUMBER_OF_TOKENS)
    held.take(10, [("c", 0)])
    assert held.free(BLOCKS)[1] == BLOCKS * BLOCK - 10
