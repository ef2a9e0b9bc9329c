import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine import UnsupportedModel
from pagestream_engine.plan import MAX_PADDING, KVGroup, KVSpec, full_attention, make_layout

FULL, WINDOW = KVSpec(8, 64), KVSpec(8, 64, window=1024)
CONTEXT = 32_768


def test_equal_layers_are_one_group() -> None:
    layout = make_layout([FULL] * 12, 16, CONTEXT)
    assert layout == full_attention(16, 12, FULL)
    assert (layout.num_slots, layout.padding) == (12, 0.0)


def test_a_window_that_is_not_shorter_than_the_context_is_full_attention() -> None:
    assert make_layout([FULL, WINDOW], 16, 1024) == make_layout([FULL, FULL], 16, 1024)
    assert len(make_layout([FULL, WINDOW], 16, 1025).groups) == 2


def test_as_many_layers_share_a_table_as_padding_allows() -> None:
    """Gemma 3 27B: every sixth of 62 layers is full. Windows are short, so slots that they leave empty cost little."""
    layout = make_layout([FULL if layer % 6 == 5 else WINDOW for layer in range(62)], 16, CONTEXT)
    assert layout.num_slots == 10
    assert [len(group.layers) for group in layout.groups] == [10, 10, 10, 10, 10, 2, 10]
    assert layout.padding == pytest.approx(8 / 70)


def test_each_group_has_as_many_layers_of_each_stage() -> None:
    """Stages keep the pages of their own layers: in a group of the first stage's alone the others' would be empty."""
    specs = [FULL if layer % 6 == 5 else WINDOW for layer in range(48)]
    layout = make_layout(specs, 16, CONTEXT, [range(24), range(24, 48)])
    assert layout.num_slots == 8
    assert [sum(layer < 24 for layer in group.layers) for group in layout.groups] == [4] * 6
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(48))


def test_smaller_tokens_fill_the_page_with_larger_blocks() -> None:
    layout = make_layout([KVSpec(8, 128), KVSpec(2, 128, window=64)], 16, CONTEXT)
    assert [group.block_size for group in layout.groups] == [16, 64]
    assert (layout.block_size, layout.finest_group) == (16, 0)


def test_sizes_without_a_common_page_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="given caches of 3 heads of 64 and of 2 of 64"):
        make_layout([KVSpec(3, 64), KVSpec(2, 64)], 16, CONTEXT)


@given(
    st.lists(st.sampled_from([FULL, WINDOW, KVSpec(4, 64, window=128), KVSpec(8, 128)]), min_size=1, max_size=40),
    st.sampled_from([512, 4096, CONTEXT]),
)
def test_every_layer_has_a_slot_and_pages_are_equal(specs: list[KVSpec], context: int) -> None:
    layout = make_layout(specs, 16, context)
    assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(specs)))
    assert len({group.block_size * group.spec.elements_per_token for group in layout.groups}) == 1
    taken = sum(layout.num_slots * group.max_blocks_held(context, 1) for group in layout.groups)
    needed = sum(len(group.layers) * group.max_blocks_held(context, 1) for group in layout.groups)
    assert needed <= taken <= (1 + MAX_PADDING) * needed


@given(st.integers(1, 20), st.sampled_from([1, 2, 4]), st.integers(1, 9), st.integers(0, 60))
def test_a_window_never_takes_more_than_its_bound(window: int, block_size: int, chunk: int, computed: int) -> None:
    group = KVGroup((0,), KVSpec(1, 1, window=window), block_size)
    end = computed + chunk
    held = group.num_blocks_for(end) - group.first_block(computed)
    assert held <= group.max_blocks_held(end, chunk) <= -(-(window + chunk) // block_size) + 1
    assert group.first_block(computed) * block_size <= max(0, computed - window + 1)


@given(st.integers(1, 30), st.integers(1, 200))
def test_the_longest_sequence_is_the_longest_that_fits(num_blocks: int, limit: int) -> None:
    layout = make_layout([KVSpec(1, 1), KVSpec(1, 1, window=20)], 4, 4096)
    longest = layout.max_tokens(num_blocks, limit)
    assert longest == max(tokens for tokens in range(limit + 1) if layout.num_blocks_for(tokens) <= num_blocks)
