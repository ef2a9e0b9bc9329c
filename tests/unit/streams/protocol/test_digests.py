import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry
from pagestream_streams.protocol.digests import chain, chained


def sha(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()[:16]  # noqa: S324


def test_chain_is_the_stored_form() -> None:
    """Lua scripts compute the same: this form can't be changed."""
    first = chain("", LogEntry(choice=2, token_id=77))
    assert first == sha(":c:2:t:77")
    second = chain(first, LogEntry(choice=2, finish=ChoiceFinish(reason=FINISH_REASON_LENGTH)))
    assert second == sha(f"{first}:c:2:f:length")
    assert chain(second, LogEntry(end=LogEnd(reason=FINISH_REASON_STOP))) == sha(f"{second}:end:stop")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_equal_digests_mean_equal_tokens(one: list[int], other: list[int]) -> None:
    last = [chained("", [LogEntry(token_id=token) for token in each])[-1].digest for each in (one, other)]
    assert (last[0] == last[1]) == (one == other)


def test_an_entry_without_a_body_is_refused() -> None:
    with pytest.raises(ValueError, match="no body"):
        chain("", LogEntry(text="x"))


def test_a_finish_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="finish reason"):
        chain("", LogEntry(finish=ChoiceFinish()))
