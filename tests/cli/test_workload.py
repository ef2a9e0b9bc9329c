import itertools
import random
import statistics
from pathlib import Path

import pytest
from pagestream_cli.bench import LengthRange, from_prompts, from_random, from_trace, poisson, with_poisson
from pagestream_simulator import InputFileInvalidError, TraceRow

OUTPUT = LengthRange(8, 8)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_one() -> None:
    arrivals = poisson(20_001, 5.0, random.Random(1))
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert arrivals[0] == 0.0
    assert min(gaps) > 0
    # Means of 20,000 exponential gaps scatter by 0.7 %; an exponential's deviation equals its mean.
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.04)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)


def test_poisson_arrivals_follow_their_seed() -> None:
    assert poisson(5, 1.0, random.Random(3)) == poisson(5, 1.0, random.Random(3))
    assert poisson(5, 1.0, random.Random(3)) != poisson(5, 1.0, random.Random(4))
    assert poisson(1, 1.0, random.Random(3)) == [0.0]


def test_random_lengths_and_tokens_stay_in_their_ranges() -> None:
    requests = from_random(300, LengthRange(3, 9), LengthRange(2, 4), 50, random.Random(0))
    lengths = {len(request.prompt) for request in requests}
    assert lengths == set(range(3, 10))
    assert {request.max_tokens for request in requests} == {2, 3, 4}
    assert all(isinstance(token, int) and 0 <= token < 50 for request in requests for token in request.prompt)
    assert all(request.ignore_eos and request.due_s == 0.0 for request in requests)
    assert requests == from_random(300, LengthRange(3, 9), LengthRange(2, 4), 50, random.Random(0))


def test_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("first\n\nsecond\n")
    requests = from_prompts(path, OUTPUT, random.Random(0), None)
    assert [(request.prompt, request.max_tokens, request.ignore_eos) for request in requests] == [
        ("first", 8, False),
        ("second", 8, False),
    ]
    assert [request.prompt for request in from_prompts(path, OUTPUT, random.Random(0), 3)] == [
        "first",
        "second",
        "first",
    ]


def test_prompts_as_json_objects(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one", "max_tokens": 3}\n{"prompt": [5, 6]}\n')
    requests = from_prompts(path, OUTPUT, random.Random(0), None)
    assert [(request.prompt, request.max_tokens) for request in requests] == [("one", 3), ((5, 6), 8)]


@pytest.mark.parametrize(("name", "text"), [("a.txt", "\n\n"), ("a.jsonl", "[]\n"), ("a.jsonl", '{"text": 1}\n')])
def test_files_without_prompts_are_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputFileInvalidError):
        from_prompts(tmp_path / name, OUTPUT, random.Random(0), None)


def test_a_trace_becomes_requests_of_its_lengths_and_arrivals() -> None:
    rows = [TraceRow(0.0, 5, 3), TraceRow(10.0, 7, 2)]
    requests = from_trace(rows, vocab_size=30, time_scale=4.0, seed=0)
    assert [(request.due_s, len(request.prompt), request.max_tokens) for request in requests] == [
        (0.0, 5, 3),
        (2.5, 7, 2),
    ]
    assert all(request.ignore_eos for request in requests)
    assert requests == from_trace(rows, vocab_size=30, time_scale=4.0, seed=0)
    assert requests != from_trace(rows, vocab_size=30, time_scale=4.0, seed=1)


def test_equal_blocks_of_a_trace_are_equal_tokens() -> None:
    rows = [TraceRow(0.0, 10, 1, (1, 2), 4), TraceRow(1.0, 12, 1, (1, 2, 3), 4), TraceRow(2.0, 6, 1, (1, 9), 4)]
    first, second, third = (request.prompt for request in from_trace(rows, 1000, 1.0, seed=0))
    assert first[:8] == second[:8]
    assert first[8:] != second[8:10]
    assert third[:4] == first[:4]
    assert third[4:] != first[4:6]
    assert [len(prompt) for prompt in (first, second, third)] == [10, 12, 6]


def test_poisson_replaces_the_arrivals_of_any_workload() -> None:
    requests = from_trace([TraceRow(100.0, 5, 3), TraceRow(200.0, 5, 3)], 30, 1.0, seed=0)
    due = [request.due_s for request in with_poisson(requests, 2.0, random.Random(5))]
    assert due == poisson(2, 2.0, random.Random(5))
