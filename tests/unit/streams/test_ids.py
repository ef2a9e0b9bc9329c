import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_streams import ids


@given(model=st.text(max_size=50), partition=st.integers(0, ids.MAX_PARTITIONS - 1))
def test_an_id_finds_its_parts(model: str, partition: int) -> None:
    parts = ids.parse(ids.new(model, partition))
    assert parts is not None
    assert (parts.model_tag, parts.partition) == (ids.model_tag(model), partition)


def test_ids_differ() -> None:
    assert len({ids.new("m", 0) for _ in range(100)}) == 100


@pytest.mark.parametrize("text", ["", "a", "0" * 46, "ABCDEF01-0000-" + "0" * 32, "00000000-0000-" + "0" * 32 + "\n"])
def test_what_is_no_id_has_no_parts(text: str) -> None:
    assert ids.parse(text) is None


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    parts = ids.parse(text)
    assert parts is None or str(parts) == text
