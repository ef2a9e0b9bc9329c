"""What replay compares, and what it says."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from pagestream.v1.inference_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    LogprobEntry,
    SamplingParams,
    TokenIds,
    TokenLogprobs,
)
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, RequestSpec
from pagestream_cli.replay import Answer, bounded, first_difference, largest_gap, read_log

WHOLE = Answer([5, 6, 7], "abc", "stop", ".")


def spec(n: int = 1, prompts: int = 1, max_tokens: int = 16) -> RequestSpec:
    return RequestSpec(
        request_id="id",
        prompts=[TokenIds(ids=[1])] * prompts,
        sampling=SamplingParams(n=n, seed=3, max_tokens=max_tokens),
    )


def token(choice: int, token_id: int, text: str, logprob: float | None = None) -> LogEntry:
    entry = LogEntry(choice=choice, token_id=token_id, text=text)
    if logprob is not None:
        entry.logprobs.CopyFrom(TokenLogprobs(entries=[LogprobEntry(token_id=token_id, logprob=logprob)]))
    return entry


def test_a_log_is_read_choice_by_choice() -> None:
    entries = [
        token(0, 5, "a", -0.5),
        token(1, 9, "x"),
        token(0, 6, ""),
        LogEntry(choice=0, text="b", finish=ChoiceFinish(reason=FINISH_REASON_STOP, stop_reason=".")),
        LogEntry(choice=1, finish=ChoiceFinish(reason=FINISH_REASON_LENGTH)),
        LogEntry(end=LogEnd(reason=FINISH_REASON_STOP)),
    ]
    assert read_log(spec(n=2), entries) == [Answer([5, 6], "ab", "stop", ".", [-0.5]), Answer([9], "x", "length")]


def test_a_choice_that_had_no_token_is_there_all_the_same() -> None:
    entries = [LogEntry(end=LogEnd(reason=FINISH_REASON_CANCELLED))]
    answers = read_log(spec(n=2, prompts=2), entries)
    assert answers == [Answer()] * 4
    assert all(answer.is_cut_short for answer in answers)


def test_equal_answers_have_no_difference() -> None:
    assert first_difference([WHOLE, WHOLE], [replace(WHOLE), replace(WHOLE)]) is None


@pytest.mark.parametrize(
    ("again", "what", "values"),
    [
        (replace(WHOLE, token_ids=[5, 9, 7]), "token 1", ("6", "9")),
        (replace(WHOLE, token_ids=[5, 6]), "token 2", ("7", "its end")),
        (replace(WHOLE, token_ids=[5, 6, 7, 8]), "token 3", ("its end", "8")),
        (replace(WHOLE, text="abd"), "text", ("'abc'", "'abd'")),
        (replace(WHOLE, finish_reason="length"), "finish reason", ("'stop'", "'length'")),
        (replace(WHOLE, stop_reason="!"), "stop reason", ("'.'", "'!'")),
    ],
)
def test_the_first_difference_is_found(again: Answer, what: str, values: Sequence[str]) -> None:
    difference = first_difference([WHOLE, WHOLE], [WHOLE, again])
    assert difference is not None
    assert (difference.choice, difference.what, (difference.recorded, difference.again)) == (1, what, values)


@pytest.mark.parametrize("reason", ["cancelled", "deadline", "error", ""])
def test_what_was_cut_short_is_compared_as_far_as_it_goes(reason: str) -> None:
    cut = Answer([5, 6], "a", reason)
    assert first_difference([cut], [WHOLE]) is None
    assert first_difference([cut], [replace(WHOLE, token_ids=[5, 7, 7])]) is not None


def test_log_probabilities_are_measured_not_compared() -> None:
    first, second = replace(WHOLE, logprobs=[-0.5, -1.0]), replace(WHOLE, logprobs=[-0.5, -1.25])
    assert first_difference([first], [second]) is None
    assert largest_gap([first], [second]) == 0.25
    assert largest_gap([WHOLE], [WHOLE]) is None


def test_a_request_that_was_cut_short_is_not_generated_to_its_end() -> None:
    asked = spec(max_tokens=1_000)
    assert bounded(asked, [Answer([5, 6], "a", "cancelled")]).sampling.max_tokens == 2
    assert bounded(asked, [Answer()]).sampling.max_tokens == 1
    assert bounded(asked, [WHOLE]) == asked
    assert asked.sampling.max_tokens == 1_000
