from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_scaling.memory import Window, with_highest, with_lowest

ENTRIES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=60)


@settings(deadline=None)
@given(ENTRIES, st.integers(0, 20))
def test_windows_hold_the_highest_and_the_lowest(steps: list[tuple[int, int]], span: int) -> None:
    now, seen = 0, []
    highest: Window = ()
    lowest: Window = ()
    for passed, value in steps:
        now += passed
        seen.append((now, value))
        highest, lowest = with_highest(highest, now, value, span), with_lowest(lowest, now, value, span)
        recent = [each for time, each in seen if now - time <= span]
        assert highest[0][1] == max(recent)
        assert lowest[0][1] == min(recent)
        assert len(highest) <= 10
        assert len(lowest) <= 10
