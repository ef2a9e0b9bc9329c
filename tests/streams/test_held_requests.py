"""Requests that an engine holds, compared with what Redis shows."""

import pytest
from pagestream.v1.inference_pb2 import FINISH_REASON_STOP
from pagestream.v1.records_pb2 import LogEnd, LogEntry
from pagestream_streams import Append, AppendKind, AppendOutcome
from pagestream_streams.engine.session import HeldRequests
from pagestream_streams.protocol import to_entry_values


def test_lost_is_what_the_same_claim_held_before_and_after() -> None:
    active = HeldRequests()
    for name in ("kept", "gone", "again"):
        active.add(name, 1, "n")
    before = active.snapshot()
    active.add("again", 2, "m")
    active.add("new", 1, "n")
    assert active.lost(before, {"kept"}) == ["gone"]


def test_unclaimed_needs_two_answers() -> None:
    active = HeldRequests()
    active.add("held", 1, "n")
    assert active.unclaimed({"held", "x"}) == []
    assert active.unclaimed({"held", "x"}) == ["x"]


def test_unclaimed_that_vanishes_starts_anew() -> None:
    active = HeldRequests()
    active.unclaimed({"x"})
    active.unclaimed(set())
    assert active.unclaimed({"x"}) == []


def test_unclaimed_waits_for_claims_that_were_on_their_way() -> None:
    active = HeldRequests()
    with active.claiming():
        assert active.unclaimed({"x"}) == []
        assert active.unclaimed({"x"}) == []
    with active.claiming():
        assert active.unclaimed({"x"}) == ["x"], "a later claim can't bring what was owned before it"


def test_fence_of_what_isn_t_held_is_any_claim() -> None:
    active = HeldRequests()
    active.add("x", 3, "n")
    assert active.fence("x") == (3, "n")
    active.drop(["x", "y"])
    assert active.fence("x") == ("", "")
    assert list(active) == []


@pytest.mark.parametrize(
    ("kind", "is_over"),
    [(AppendKind.OK, False), (AppendKind.GAP, False), (AppendKind.AWAY, False), (AppendKind.FENCED, True)],
)
def test_an_append_settles_its_own_claim(kind: AppendKind, is_over: bool) -> None:
    active = HeldRequests()
    active.add("x", 1, "n")
    assert active.drop_if_over(Append("x", 1, "n", 0, []), AppendOutcome(kind, 0)) is is_over
    assert ("x" in active) is not is_over


def test_an_end_finishes_a_request_and_an_earlier_claim_s_loss_does_not() -> None:
    active = HeldRequests()
    active.add("x", 2, "m")
    assert active.drop_if_over(Append("x", 1, "n", 0, []), AppendOutcome(AppendKind.FENCED, 0))
    assert "x" in active
    end = [to_entry_values(LogEntry(end=LogEnd(reason=FINISH_REASON_STOP)))]
    assert active.drop_if_over(Append("x", 2, "m", 0, end), AppendOutcome(AppendKind.OK, 1))
    assert "x" not in active
