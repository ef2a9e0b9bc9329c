"""What a worker publishes of its answers' lengths is what a gateway expects of the next ones."""

import json

import pytest
from pagestream_engine.request.length_predictor import LengthPredictor, RequestShape
from pagestream_streams.protocol.expected_lengths import ExpectedLengths

MOST = 4000


def published(*answers: tuple[int, str, int], times: int = 40) -> bytes:
    """Return the table of an engine after requests of (prompt tokens, tenant, output tokens)."""
    predictor = LengthPredictor()
    for _ in range(times):
        for num_prompt, tenant, num_output in answers:
            predictor.note_length(RequestShape(num_prompt, tenant, MOST), num_output)
    return json.dumps(predictor.table(16)).encode()


def test_a_gateway_expects_by_prompt_and_tenant() -> None:
    lengths = ExpectedLengths()
    assert lengths.expected("m", 1000, "brief", MOST) == 0, "nothing is known"
    lengths.note("m", [published((1000, "brief", 50), (1000, "talks", 500)), published((30, "brief", 200))])
    assert lengths.expected("m", 1010, "brief", MOST) == pytest.approx(50, rel=0.4)
    assert lengths.expected("m", 1010, "talks", MOST) == pytest.approx(500, rel=0.4)
    assert lengths.expected("m", 30, "new", MOST) == pytest.approx(200, rel=0.2)
    assert lengths.expected("m", 1010, "talks", 20) == 20
    lengths.note("m", [])
    assert lengths.expected("m", 30, "new", MOST) > 0, "the last engine may have gone"
    assert lengths.expected("other", 30, "new", MOST) == 0


def test_engines_count_by_what_they_know_and_what_cannot_be_read_counts_not() -> None:
    lengths = ExpectedLengths()
    lengths.note("m", [published((100, "t", 10), times=90), published((100, "t", 100), times=10), b"{", b"[]"])
    assert lengths.expected("m", 100, "t", MOST) == pytest.approx(19, abs=1)


@pytest.mark.parametrize(
    ("scales", "row"),
    [
        ("4, 8", "NaN, 9"),
        ("4, 8", "Infinity, 9"),
        ("4, 8", "-5, 9"),
        ("4, 8", "5, -9"),
        ("4, 8", "5, 0"),
        ("4, 8", "1e308, 10"),
        ("4, 8", "7, []"),
        ("0, 8", "5, 9"),
        ("Infinity, 8", "5, 9"),
        ("4, -1", "5, 9"),
    ],
)
def test_an_engine_that_publishes_nonsense_counts_for_nothing(scales: str, row: str) -> None:
    octave_parts, prior = scales.split(", ")
    rows = f"[[null, null, 500, 40], [null, null, {row}]]"
    bad = f'{{"octave_parts": {octave_parts}, "prior": {prior}, "rows": {rows}}}'.encode()
    lengths = ExpectedLengths()
    lengths.note("m", [bad])
    assert lengths.expected("m", 100, "t", MOST) == 0
    lengths.note("m", [published((100, "t", 10)), bad])
    assert lengths.expected("m", 100, "t", MOST) == pytest.approx(10, abs=1)


def test_a_table_has_a_bounded_number_of_rows() -> None:
    predictor = LengthPredictor()
    for number in range(100):
        predictor.note_length(RequestShape(100, str(number), MOST), 7)
    assert len(predictor.table(16)["rows"]) == 16
