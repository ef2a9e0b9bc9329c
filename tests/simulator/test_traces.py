"""Traces of requests: their formats, the packaged sample, and lengths that fit a context."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_simulator import (
    InputFileInvalidError,
    SettingInvalidError,
    TraceRow,
    read_trace,
    scale_factor,
    scale_to_context,
)


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


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:46.6805900,0,0
"""
MOONCAKE = """{"timestamp": 500, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}

{"timestamp": 2500, "input_length": 600, "output_length": 7, "hash_ids": [0, 2]}
"""


def test_reads_azures_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    rows = read_trace(str(path))
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 4.314579, 60.0], abs=1e-5)
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(374, 44), (396, 109), (1, 1)]
    assert rows[0].blocks == ()


def test_reads_mooncakes_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    assert read_trace(str(path)) == [TraceRow(0.0, 1000, 5, (0, 1)), TraceRow(2.0, 600, 7, (0, 2))]


def test_the_first_requests_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    assert len(read_trace(str(path), limit=2)) == 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "", "no column TIMESTAMP"),
        ("a.csv", "TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,ten,1\n", "line 2 of the trace"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,10,1\n", "line 2 of the trace"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,-10,1\n", "negative"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46\n", "line 2 of the trace"),
        ("a.jsonl", "{}\n", "line 1 of the trace has no 'timestamp'"),
        ("a.jsonl", "not json\n", "line 1 of the trace"),
        ("a.jsonl", "[1]\n", "line 1 of the trace"),
    ],
)
def test_a_malformed_trace_is_refused_with_its_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputFileInvalidError, match=said):
        read_trace(str(path))


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputFileInvalidError, match="No such file"):
        read_trace(str(tmp_path / "none.csv"))
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00" * 10)
    with pytest.raises(InputFileInvalidError, match="not a text file"):
        read_trace(str(tmp_path / "b.csv"))


def test_the_packaged_sample_is_read_from_zero() -> None:
    rows = read_trace("sample")
    assert len(rows) == 400
    assert rows[0].arrival_s == 0.0
