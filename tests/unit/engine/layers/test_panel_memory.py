"""Packed weights lie side by side in large chunks."""

from __future__ import annotations

from pagestream_engine.layers.native.panel_memory import PanelMemory


def test_pieces_share_a_chunk_and_lie_on_lines_of_the_cache() -> None:
    memory = PanelMemory()
    first, second = memory.take(17), memory.take(300)
    assert (first.shape, second.shape) == ((17,), (300,))
    assert second.data_ptr() - first.data_ptr() == 32 * 4
    first.fill_(1)
    second.fill_(2)
    assert first.tolist() == [1] * 17


def test_a_piece_larger_than_a_chunk_has_its_own() -> None:
    memory = PanelMemory()
    small, large, next_one = memory.take(5), memory.take((16 << 20) + 5), memory.take(5)
    assert len(large) == (16 << 20) + 5
    pointers = sorted((small.data_ptr(), large.data_ptr(), next_one.data_ptr()))
    assert len(set(pointers)) == 3
