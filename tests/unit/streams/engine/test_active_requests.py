from pagestream_streams.engine.active_requests import ActiveRequests


def test_lost_is_what_the_same_claim_held_before_and_after() -> None:
    active = ActiveRequests()
    for name in ("kept", "gone", "again"):
        active.add(name, 1, "n")
    before = active.snapshot()
    active.add("again", 2, "m")
    active.add("new", 1, "n")
    assert active.lost(before, {"kept"}) == ["gone"]


def test_unclaimed_needs_two_answers() -> None:
    active = ActiveRequests()
    active.add("held", 1, "n")
    assert active.unclaimed({"held", "x"}) == []
    assert active.unclaimed({"held", "x"}) == ["x"]


def test_unclaimed_that_vanishes_starts_anew() -> None:
    active = ActiveRequests()
    active.unclaimed({"x"})
    active.unclaimed(set())
    assert active.unclaimed({"x"}) == []


def test_unclaimed_waits_for_claims_that_were_on_their_way() -> None:
    active = ActiveRequests()
    with active.claiming():
        assert active.unclaimed({"x"}) == []
        assert active.unclaimed({"x"}) == []
    with active.claiming():
        assert active.unclaimed({"x"}) == ["x"], "a later claim can't bring what was owned before it"


def test_fence_of_what_isn_t_held_is_any_claim() -> None:
    active = ActiveRequests()
    active.add("x", 3, "n")
    assert active.fence("x") == (3, "n")
    active.drop(["x", "y"])
    assert active.fence("x") == ("", "")
    assert list(active) == []
