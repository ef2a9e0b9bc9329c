import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_simulator.errors import SettingInvalidError
from pagestream_simulator.traces.context import scale_factor, scale_to_context
from pagestream_simulator.traces.files import TraceRow


def rows_of(*lengths: tuple[int, int]) -> list[TraceRow]:
    return [TraceRow(float(i), *length) for i, length in enumerate(lengths)]


def test_one_factor_for_all_lengths() -> None:
    scaled = scale_to_context(rows_of(*[(600, 200)] * 198, (60, 20), (1200, 400)), context=160)
    assert scale_factor(rows_of(*[(600, 200)] * 100), 160) == pytest.approx(0.2)
    assert (scaled[0].input_tokens, scaled[0].output_tokens) == (120, 40)
    assert (scaled[198].input_tokens, scaled[198].output_tokens) == (12, 4)


def test_outliers_are_shrunk_further_to_the_context() -> None:
    scaled = scale_to_context(rows_of(*[(60, 40)] * 999, (9000, 1000)), context=100)
    assert (scaled[0].input_tokens, scaled[0].output_tokens) == (60, 40)
    assert (scaled[999].input_tokens, scaled[999].output_tokens) == (90, 10)


def test_a_trace_that_fits_is_unchanged() -> None:
    rows = rows_of((10, 20), (30, 5))
    assert scale_to_context(rows, context=4096) == rows


def test_shared_blocks_shrink_with_the_lengths() -> None:
    rows = [TraceRow(0.0, 1000, 24, (7, 8))]
    assert scale_to_context(rows, context=256)[0].block_tokens == 128


@given(
    st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 20_000)), min_size=1, max_size=60),
    st.integers(2, 8192),
)
def test_every_request_fits_and_has_a_prompt_and_an_answer(lengths: list[tuple[int, int]], context: int) -> None:
    rows = rows_of(*lengths)
    for before, after in zip(rows, scale_to_context(rows, context), strict=True):
        assert 1 <= after.input_tokens <= max(before.input_tokens, 1)
        assert 1 <= after.output_tokens <= max(before.output_tokens, 1)
        assert after.input_tokens + after.output_tokens <= context
        assert after.arrival_s == before.arrival_s


def test_a_context_without_room_is_refused() -> None:
    with pytest.raises(SettingInvalidError, match="context of 1"):
        scale_to_context(rows_of((1, 1)), context=1)
