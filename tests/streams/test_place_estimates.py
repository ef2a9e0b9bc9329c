"""Places are exact near both ends of a queue, and estimated by arrival between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_streams.admin.queue_positions import EntryId, Outline, QueueOutline

ENTRIES = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 9)), min_size=1, max_size=40)
"""Arrival and tokens."""


def outlined(entries: list[tuple[int, int]], sampled: int) -> QueueOutline:
    known = [(EntryId(ms, 0), tokens) for ms, tokens in sorted(entries)]
    last = known[: -sampled - 1 : -1] if len(known) > sampled else []
    return QueueOutline("0", len(known), sum(tokens for _, tokens in known), known[:sampled], last)


@given(entries=ENTRIES, sampled=st.integers(1, 8), at=st.integers(-1, 1001))
def test_a_queue_is_exact_but_for_what_lies_between_the_samples(
    entries: list[tuple[int, int]], sampled: int, at: int
) -> None:
    requests, tokens = outlined(entries, sampled).before(EntryId(at, 0))
    early = [size for ms, size in entries if ms < at]
    between = max(0, len(entries) - 2 * sampled)
    assert abs(requests - len(early)) <= between
    assert abs(tokens - sum(early)) <= 9 * between


@given(entries=ENTRIES, sampled=st.integers(1, 8), first=st.integers(0, 1000), second=st.integers(0, 1000))
def test_who_comes_later_has_as_many_before_it(
    entries: list[tuple[int, int]], sampled: int, first: int, second: int
) -> None:
    outline = outlined(entries, sampled)
    earlier, later = sorted((EntryId(first, 0), EntryId(second, 0)))
    assert outline.before(earlier)[0] <= outline.before(later)[0]


def test_an_even_queue_is_estimated_well() -> None:
    outline = outlined([(ms, 5) for ms in range(1000)], 4)
    requests, tokens = outline.before(EntryId(500, 0))
    assert (requests, tokens) == pytest.approx((500, 2500), rel=0.01)


def test_classes_and_begun_requests_count_by_their_keys() -> None:
    queues = [
        QueueOutline("0", 2, 20, [(EntryId(100, 0), 10), (EntryId(900, 0), 10)], ()),
        QueueOutline("1", 1, 10, [(EntryId(100, 0), 10)], ()),
        QueueOutline("resume:f", 1, 10, [(EntryId(5000, 0), 10)], ()),
    ]
    outline = Outline(queues, drain_rate=100.0, has_engines=True)
    assert outline.position_of("1", EntryId(100, 0), 500) == (2, 200), "the one of class 0 and the begun one"
    assert outline.position_of("0", EntryId(900, 0), 500) == (3, 300)
    assert outline.position_of("resume:f", EntryId(5000, 0), 500) == (0, 0)
    assert Outline(queues, drain_rate=100.0, has_engines=False).position_of("0", EntryId(900, 0), 500) == (3, None)
