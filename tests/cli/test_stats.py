import pytest
from pagestream_cli.bench import Outcome, spread, summarize


def outcome(
    *,
    sent: float = 0.0,
    ended: float = 1.0,
    tokens: int = 0,
    times: tuple[float, ...] = (),
    error: str = "",
    due: float = 0.0,
) -> Outcome:
    return Outcome(due, sent, ended, input_tokens=10, output_tokens=tokens, token_times_s=times, error=error)


def test_a_spread_is_in_milliseconds() -> None:
    found = spread([0.1, 0.2, 0.3])
    assert found is not None
    assert (found.count, found.mean, found.p50, found.max) == pytest.approx((3, 200.0, 200.0, 300.0))
    assert found.p90 == pytest.approx(280.0)
    assert spread([]) is None


def test_the_measures_of_one_request() -> None:
    one = outcome(sent=2.0, ended=3.5, tokens=5, times=(0.5, 0.7, 1.3))
    assert one.e2e_s == 1.5
    assert one.ttft_s == 0.5
    assert one.tpot_s == pytest.approx(0.8 / 4)
    assert one.itl_s == pytest.approx([0.2, 0.6])


def test_an_answer_of_one_token_has_no_time_per_further_token() -> None:
    assert outcome(tokens=1, times=(0.5,)).tpot_s is None
    assert outcome().ttft_s is None


def test_a_summary_counts_only_what_succeeded_and_names_the_errors() -> None:
    summary = summarize(
        [
            outcome(sent=1.0, ended=3.0, tokens=3, times=(0.5, 1.0, 2.0)),
            outcome(sent=2.0, ended=5.0, tokens=1, times=(1.5,), due=1.75),
            outcome(sent=2.0, ended=2.1, error="http 429"),
            outcome(sent=2.0, ended=2.2, error="http 429"),
            outcome(sent=2.0, ended=2.2, tokens=7, times=(0.1,), error="timeout"),
        ]
    )
    assert (summary.requests, summary.succeeded) == (5, 2)
    assert summary.errors == {"http 429": 2, "timeout": 1}
    assert summary.duration_s == 4.0
    assert (summary.input_tokens, summary.output_tokens) == (20, 4)
    assert summary.requests_per_s == 0.5
    assert summary.output_tokens_per_s == 1.0
    assert summary.ttft is not None
    assert summary.ttft.mean == 1000.0
    assert summary.tpot is not None
    assert summary.tpot.count == 1
    assert summary.e2e is not None
    assert summary.e2e.max == 3000.0
    assert summary.late is not None
    assert summary.late.max == 2000.0


def test_a_summary_of_failures_has_no_latencies() -> None:
    summary = summarize([outcome(error="connection")])
    assert summary.ttft is None
    assert summary.e2e is None
    assert summary.output_tokens_per_s == 0.0
