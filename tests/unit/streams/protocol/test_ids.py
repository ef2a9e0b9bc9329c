import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_streams.protocol import ids


@given(
    model=st.text(max_size=50), partition=st.integers(0, ids.MAX_PARTITIONS - 1), tenants=st.sets(st.text(), min_size=2)
)
def test_an_id_finds_its_parts(model: str, partition: int, tenants: set[str]) -> None:
    tenant, *others = tenants
    parts = ids.parse(ids.new(model, partition, tenant))
    assert parts is not None
    assert (parts.model_tag, parts.partition) == (ids.model_tag(model), partition)
    assert parts.is_of(tenant)
    assert not any(parts.is_of(other) for other in others)


def test_ids_differ_and_do_not_show_which_are_one_tenants() -> None:
    made = [ids.new("m", 0, "t") for _ in range(100)]
    assert len(set(made)) == 100
    assert len({each[-8:] for each in made}) == 100


@pytest.mark.parametrize("text", ["", "a", "0" * 46, "ABCDEF01-0000-" + "0" * 32, "00000000-0000-" + "0" * 32 + "\n"])
def test_what_is_no_id_has_no_parts(text: str) -> None:
    assert ids.parse(text) is None


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    parts = ids.parse(text)
    assert parts is None or str(parts) == text
