"""What an engine owes to requests that it has begun, by a clock of its own."""

from pagestream_worker.models.turns import Turns


def seconds_owed(turns: Turns, first_token_s: float, began: int = 0) -> int:
    """Return for how long a turn owes a sequence that is claimed at its begin."""
    return next(now for now in range(10_000) if not turns.owes({"a"} if now < first_token_s else (), began + now))


def test_a_turn_owes_the_first_token_and_as_much_time_again() -> None:
    turns = Turns(min_serve_s=10, max_serve_s=60)
    for first_token_s, expected in ((0, 0), (4, 8), (25, 35), (55, 65)):
        turns.begin("a", 0)
        assert seconds_owed(turns, first_token_s) == expected


def test_what_comes_late_in_a_turn_waits_for_the_next() -> None:
    turns = Turns(min_serve_s=10, max_serve_s=60)
    turns.begin("a", 0)
    assert not turns.owes((), 11)
    assert not turns.owes({"late"}, 12)
    turns.begin("a", 20)
    assert turns.owes({"late"}, 40), "the first look counts, however late it is"


def test_a_turn_that_was_too_short_is_twice_as_long_while_that_is_needed() -> None:
    turns = Turns(min_serve_s=10, max_serve_s=60)
    now = 0
    for first_token_s, expected in ((150, 60), (150, 120), (150, 160), (150, 160), (5, 10), (150, 60)):
        turns.begin("a", now)
        assert seconds_owed(turns, first_token_s, now) == expected
        now += expected
        turns.begin("b", now)
        assert seconds_owed(turns, 50, now) == 60, "the limit is that of the model"
        now += 60


def test_turns_grow_to_a_bound() -> None:
    turns = Turns(min_serve_s=10, max_serve_s=60)
    now, owed = 0, []
    for _ in range(7):
        turns.begin("a", now)
        owed.append(seconds_owed(turns, 9_999, now))
        now += owed[-1]
    assert owed == [60, 120, 240, 480, 960, 960, 960]


def test_a_turn_that_an_order_ended_was_not_too_short() -> None:
    turns = Turns(min_serve_s=10, max_serve_s=60)
    turns.begin("a", 0)
    assert turns.owes({"a"}, 2)
    turns.begin("b", 2)
    turns.begin("a", 20)
    assert seconds_owed(turns, 150, 20) == 60
