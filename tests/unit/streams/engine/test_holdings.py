from pagestream_streams.engine.holdings import Holdings


def test_lost_is_what_the_same_claim_held_before_and_after() -> None:
    holdings = Holdings()
    for name in ("kept", "gone", "again"):
        holdings.add(name, 1, "n")
    before = holdings.snapshot()
    holdings.add("again", 2, "m")
    holdings.add("new", 1, "n")
    assert holdings.lost(before, {"kept"}) == ["gone"]


def test_unknown_needs_two_answers() -> None:
    holdings = Holdings()
    holdings.add("held", 1, "n")
    assert holdings.unknown({"held", "x"}) == []
    assert holdings.unknown({"held", "x"}) == ["x"]


def test_unknown_that_vanishes_starts_anew() -> None:
    holdings = Holdings()
    holdings.unknown({"x"})
    holdings.unknown(set())
    assert holdings.unknown({"x"}) == []


def test_unknown_waits_for_claims_that_were_on_their_way() -> None:
    holdings = Holdings()
    with holdings.claiming():
        assert holdings.unknown({"x"}) == []
        assert holdings.unknown({"x"}) == []
    with holdings.claiming():
        assert holdings.unknown({"x"}) == ["x"], "a later claim can't bring what was owned before it"


def test_fence_of_what_isn_t_held_is_any_claim() -> None:
    holdings = Holdings()
    holdings.add("x", 3, "n")
    assert holdings.fence("x") == (3, "n")
    holdings.drop(["x", "y"])
    assert holdings.fence("x") == ("", "")
    assert list(holdings) == []
