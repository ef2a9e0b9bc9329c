"""The committed tables of tile sizes, and who reads them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from pagestream_kernels import tuning
from pagestream_kernels.paged_decode import attend_variant
from pagestream_kernels.paged_prefill import prefill_variant
from pagestream_kernels.paging import Geometry, Options
from pagestream_kernels.tables import CHIPS, RowKey, chips, load_table, table_of_name
from pagestream_kernels.tuning import BUILT, KNOWN, TIMED, row_keys, write_table

GEOMETRY = Geometry(head_dim=128, group_size=4, block_size=64, dtype=torch.bfloat16)


@pytest.mark.parametrize("chip", KNOWN)
def test_rows_are_of_the_present_kernels(chip: str) -> None:
    table = load_table(chip)
    for operator in tuning.KERNELS:
        assert table.sources[operator] == tuning.source_hash(operator), (
            f"{chip}: {operator} has changed since its rows were built; run `make kernel-tables`"
        )
    assert json.loads((CHIPS / f"{chip}.json").read_text())["triton"] == version("triton")
    assert set(table.rows) <= set(row_keys(table.target))
    assert set(table.chosen.values()) <= {BUILT, TIMED}


@pytest.mark.parametrize("chip", KNOWN)
def test_every_chip_has_rows_for_heads_of_128(chip: str) -> None:
    keys = load_table(chip).rows
    assert {"paged_decode", "paged_prefill"} == {key.operator for key in keys if key.head_dim == 128}


def test_a_kernels_hash_changes_with_its_code_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "@kernel('a')\ndef f(a):\n    {}return a{}\n\ndef launch():\n    return {}\n"

    def hashed(*parts: object) -> str:
        (tmp_path / "one.py").write_text(code.format(*parts))
        return tuning.source_hash("one")

    monkeypatch.setattr(tuning, "PACKAGE", tmp_path)
    monkeypatch.setattr(tuning, "KERNELS", {"one": ("f", ("one.py",))})
    before = hashed("", "", 1)
    assert hashed("'Text.'\n    ", "  # comment", 2) == before
    assert hashed("", " + 1", 1) != before


def test_a_variant_is_cut_as_its_chips_table_says() -> None:
    table = load_table("h100")
    row = table.rows[RowKey("paged_prefill", "bfloat16", 128, 64, 64)]
    variant = prefill_variant(GEOMETRY, "cuda", Options(), table=table)
    assert (variant.constants["BLOCK_ROWS"], variant.constants["BLOCK_KV"]) == (row.rows, row.tokens)
    assert (variant.num_warps, variant.num_stages) == (row.warps, row.stages)
    for group_size, group in ((4, 16), (64, 64)):
        row = table.rows[RowKey("paged_decode", "bfloat16", 128, group, 64)]
        attend = attend_variant(replace(GEOMETRY, group_size=group_size), "cuda", Options(), table=table)
        assert (attend.constants["BLOCK_ROWS"], attend.constants["BLOCK_KV"]) == (row.rows, row.tokens)


@pytest.mark.parametrize(
    ("changes", "num_rows"), [({"head_dim": 80}, 4), ({"alignment": 8}, 4), ({"block_size": 8}, 4), ({}, 65)]
)
def test_a_table_has_no_row_for_what_was_not_built(changes: dict[str, int], num_rows: int) -> None:
    fields = {name: getattr(GEOMETRY, name) for name in ("head_dim", "group_size", "block_size", "dtype")}
    assert load_table("h100").find("paged_decode", Geometry(**{**fields, **changes}), num_rows) is None


def test_larger_pages_take_the_row_of_the_largest_below() -> None:
    table, larger = load_table("h100"), Geometry(128, 4, 256, torch.bfloat16)
    assert table.find("paged_decode", larger, 4) == table.rows[RowKey("paged_decode", "bfloat16", 128, 16, 64)]


def test_the_drivers_name_finds_the_table_and_an_unknown_one_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert table_of_name("NVIDIA H100 80GB HBM3") is load_table("h100")
    assert table_of_name("NVIDIA H200") is load_table("h200")
    assert caplog.records == []
    assert [table_of_name("NVIDIA Unheard 9000") for _ in range(3)] == [None] * 3
    assert [record.getMessage().count("NVIDIA Unheard 9000") for record in caplog.records] == [1]
    assert chips() == sorted(KNOWN)


def test_rows_of_unchanged_kernels_are_taken_over(tmp_path: Path) -> None:
    """Without a build: nothing here compiles."""
    kept = json.loads((CHIPS / "h100.json").read_text())
    kept["rows"][0]["tokens"] = 7
    (tmp_path / "h100.json").write_text(json.dumps(kept))
    written = json.loads(write_table("h100", tmp_path, again=False).read_text())
    assert written["rows"] == kept["rows"]
