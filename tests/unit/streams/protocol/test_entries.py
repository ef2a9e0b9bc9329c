import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import FinishReason, LogprobEntry, RequestError, TokenLogprobs, Usage
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, PromptPart
from pagestream_streams.protocol.entries import from_stream_fields, to_entry_values, to_log_entry
from pagestream_streams.protocol.finish_reasons import FINISH_REASONS

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
NUMBERS = st.integers(0, 2**32 - 1)
REASONS = st.sampled_from(sorted(FINISH_REASONS.values()))
LOGPROBS = st.none() | st.builds(
    TokenLogprobs, entries=st.lists(st.builds(LogprobEntry, token_id=NUMBERS, rank=NUMBERS, text=TEXTS), max_size=3)
)
TOKENS = st.builds(LogEntry, choice=NUMBERS, digest=TEXTS, text=TEXTS, token_id=NUMBERS, logprobs=LOGPROBS)
FINISHES = st.builds(ChoiceFinish, reason=REASONS, stop_reason=TEXTS)
ERRORS = st.none() | st.builds(RequestError, code=st.sampled_from(["engine_error", "deadline"]), message=TEXTS)
USAGES = st.builds(Usage, prompt_tokens=NUMBERS, completion_tokens=NUMBERS, cached_tokens=NUMBERS)
ENDS = st.builds(LogEnd, reason=REASONS, usage=USAGES, error=ERRORS)
PARTS = st.builds(
    PromptPart,
    end=NUMBERS,
    embedding=st.binary(max_size=8),
    logprobs=st.lists(LOGPROBS.filter(lambda each: each is not None), max_size=2),
)
ENTRIES = (
    TOKENS
    | st.builds(LogEntry, choice=NUMBERS, digest=TEXTS, prompt_part=PARTS)
    | st.builds(LogEntry, choice=NUMBERS, digest=TEXTS, text=TEXTS, finish=FINISHES)
    | st.builds(LogEntry, digest=TEXTS, end=ENDS)
)


def test_token_has_six_values_in_the_script_s_order() -> None:
    entry = LogEntry(choice=1, token_id=5, text="é", digest="d")
    assert to_entry_values(entry) == ("t", "1", "5", "é", "d", "")


def test_fields_give_the_entry() -> None:
    fields = {b"c": b"1", b"t": b"5", b"x": "é".encode(), b"d": b"d"}
    assert from_stream_fields(fields) == LogEntry(choice=1, token_id=5, text="é", digest="d")


@given(ENTRIES)
def test_values_give_the_entry(entry: LogEntry) -> None:
    assert to_log_entry(to_entry_values(entry)) == entry


def test_an_entry_without_a_body_is_refused() -> None:
    with pytest.raises(ValueError, match="no body"):
        to_entry_values(LogEntry(text="x"))


def test_a_finish_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="finish reason"):
        to_entry_values(LogEntry(finish=ChoiceFinish(reason=FinishReason.FINISH_REASON_UNSPECIFIED)))
