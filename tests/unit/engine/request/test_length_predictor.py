"""What is expected of outputs, by those before."""

import pytest
from pagestream_engine.request.length_predictor import MOST_MEDIANS, LengthPredictor
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import TokenSequence


def seq(tenant: str, num_prompt: int, num_output: int) -> TokenSequence:
    return TokenSequence(
        "s",
        [0] * num_prompt,
        SamplingParams(),
        seed=0,
        arrival=0,
        max_total_tokens=num_prompt + 2000,
        output_token_ids=[0] * num_output,
        tenant=tenant,
    )


def test_medians_follow_tenant_and_prompt() -> None:
    predictor = LengthPredictor()
    assert predictor.expected(seq("a", 1000, 0)) == 2000, "all that it may have, while nothing is known"
    for number in range(40):
        predictor.note(seq("a", 1000, 50 + number % 5))
        predictor.note(seq("b", 1000, 500 + number % 5))
        predictor.note(seq("a", 30, 200))
    assert predictor.expected(seq("a", 1010, 0)) == pytest.approx(52, rel=0.4)
    assert predictor.expected(seq("b", 1010, 0)) == pytest.approx(502, rel=0.4)
    assert predictor.expected(seq("a", 30, 0)) == pytest.approx(200, rel=0.2)


def test_tenants_without_end_do_not_fill_memory() -> None:
    predictor = LengthPredictor()
    for number in range(MOST_MEDIANS):
        predictor.note(seq(str(number), 1000, 50))
    assert len(predictor._medians) == MOST_MEDIANS
    assert predictor.expected(seq("new", 1000, 0)) == pytest.approx(50, rel=0.1), "what all share is kept"
