"""How each chip's attention kernels are cut: a committed JSON file a chip, and a rule for chips that have none."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pagestream_kernels.paging import FLOAT8, MAX_ALIGNMENT, WIDE_ALIGNMENT, Geometry, Options
from pagestream_kernels.runtime import INTERPRETED, Backend, next_power_of_two

CHIPS = Path(__file__).parent / "chips"
MIN_DOT = 16  # tl.dot's smallest side
PROGRAMS_PER_PROCESSOR = 2
"""Of decode, where no table says another number. Each has the copies of a tile in flight."""

_log = logging.getLogger(__name__)
_chosen: ContextVar[ChipTable | None] = ContextVar("chosen", default=None)


class RowKey(NamedTuple):
    """What a row of a table is for."""

    operator: str  # paged_decode or paged_prefill
    dtype: str  # of the cache, as torch names it
    head_dim: int
    group: int  # most query rows a KV head: query heads, in decode times the query tokens
    page: int  # fewest tokens of a cache block


class Row(NamedTuple):
    """How a kernel is cut."""

    rows: int  # query rows of a tile, at most
    tokens: int  # KV tokens of a tile
    warps: int
    stages: int  # of Triton's software pipeline: one more than tiles are copied ahead
    programs: int = PROGRAMS_PER_PROCESSOR  # of decode's grid, a processor


@dataclass(frozen=True, slots=True, eq=False)
class ChipTable:
    """The rows of one chip."""

    names: tuple[str, ...]  # parts of the name that the driver gives a device
    target: str  # of `aot.TARGETS`
    sources: Mapping[str, str]  # operator -> `source_hash` of the kernel that its rows were built from
    rows: Mapping[RowKey, Row]
    chosen: Mapping[RowKey, str]  # how each row was chosen: "built, not timed", or "timed"

    def find(self, operator: str, geometry: Geometry, num_rows: int) -> Row | None:
        """Return the row for `num_rows` query rows a KV head, or None where the table has none that fits."""
        dtype = str(geometry.cache_dtype).removeprefix("torch.")
        fitting = [
            key
            for key in self.rows
            if key[:3] == (operator, dtype, geometry.head_dim)
            and key.group >= num_rows
            and key.page <= geometry.block_size
        ]
        if not fitting or geometry.alignment < MAX_ALIGNMENT:
            return None
        return self.rows[min(fitting, key=lambda key: (-key.page, key.group))]


@lru_cache(maxsize=16)
def load_table(chip: str) -> ChipTable:
    """Read the committed table of a chip.

    Raises:
        OSError: there is none.
    """
    table = json.loads((CHIPS / f"{chip}.json").read_text())
    rows, chosen = {}, {}
    for entry in table["rows"]:
        key = RowKey(*(entry[name] for name in RowKey._fields))
        rows[key] = Row(*(entry[name] for name in Row._fields))
        chosen[key] = entry["chosen"]
    return ChipTable(tuple(table["names"]), table["target"], table["sources"], rows, chosen)


def chips() -> list[str]:
    """The chips that have a table."""
    return sorted(path.stem for path in CHIPS.glob("*.json"))


@contextmanager
def using_table(table: ChipTable | None) -> Iterator[None]:
    """Within the block kernels are cut by `table`, whatever the device is."""
    token = _chosen.set(table)
    try:
        yield
    finally:
        _chosen.reset(token)


def table_of(device: torch.device) -> ChipTable | None:
    """The table that serves a device: None under the interpreter, and on a chip that has none."""
    chosen = _chosen.get()
    if chosen is not None or INTERPRETED or device.type != "cuda":
        return chosen
    return table_of_name(_device_name(device))


_device_name = lru_cache(maxsize=16)(torch.cuda.get_device_name)


@lru_cache(maxsize=16)
def table_of_name(device_name: str) -> ChipTable | None:
    """The table for a driver's name of a device; where there is none a warning is logged, once a name."""
    for chip in chips():
        table = load_table(chip)
        if any(name in device_name for name in table.names):
            return table
    _log.warning(
        "no kernel table for %r, only for %s: attention tiles are cut by a rule that builds for every target; "
        "`make kernel-tables` writes tables",
        device_name,
        ", ".join(chips()),
    )
    return None


def row_for(
    operator: str, geometry: Geometry, options: Options, num_rows: int, *, backend: Backend, table: ChipTable | None
) -> Row:
    """Return how a kernel is cut: by the chip's table, or else by the rule.

    Args:
        operator: paged_decode or paged_prefill.
        num_rows: query rows a KV head: query heads, in decode times the query tokens.
    """
    row = None if table is None else table.find(operator, geometry, num_rows)
    if row is None:
        rule = decode_rule if operator == "paged_decode" else prefill_rule
        row = rule(geometry, options, num_rows, backend)
    return row


def programs_per_processor(query: Tensor, key_cache: Tensor, max_query_len: int = 1) -> int:
    """Programs of decode attention that a processor runs at a time, for `plan_decode`.

    Args:
        query: (rows, num_heads, head_dim).
        key_cache: (num_blocks, block_size, num_kv_heads, head_dim).
        max_query_len: a bound on a sequence's query rows.
    """
    table = table_of(query.device)
    if table is None:
        return PROGRAMS_PER_PROCESSOR
    group = query.shape[1] // key_cache.shape[2]
    has_scales = key_cache.dtype == FLOAT8
    geometry = Geometry(query.shape[2], group, key_cache.shape[1], query.dtype, has_scales=has_scales)
    row = table.find("paged_decode", geometry, group * max_query_len)
    return PROGRAMS_PER_PROCESSOR if row is None else row.programs


def decode_rule(  # noqa: PLR0911 - one a case
    geometry: Geometry, options: Options, num_rows: int, backend: Backend
) -> Row:
    """The largest tile of decode that compiles without spills for every target.

    In float32 the products run on the plain multipliers, whose operands fill the registers early.
    """
    block_dim = max(MIN_DOT, next_power_of_two(geometry.head_dim))
    has_whole_rows = geometry.alignment == MAX_ALIGNMENT
    is_pipelined = backend == "cuda" and geometry.alignment >= WIDE_ALIGNMENT
    if geometry.alignment < WIDE_ALIGNMENT:
        return Row(MIN_DOT, 16, warps=8, stages=1)
    if geometry.dtype == torch.float32:
        stages = 2 if is_pipelined else 1
        if block_dim <= 64:
            return Row(MIN_DOT, 64, 4, stages)
        return Row(MIN_DOT, 16, 4 if block_dim <= 128 else 8, stages)
    stages = 3 if is_pipelined else 1
    if geometry.has_scales:
        return Row(32 if block_dim <= 128 else MIN_DOT, 64 if block_dim <= 128 else 32, 8, stages)
    if block_dim <= 64:
        return Row(64 if has_whole_rows else 32, 64, 4, stages)
    if block_dim <= 128:
        rows = 32 if has_whole_rows and num_rows > MIN_DOT else MIN_DOT
        return Row(rows, 64 if rows == MIN_DOT or geometry.block_size >= 64 else 32, 4, stages)
    return Row(MIN_DOT, 32 if geometry.block_size >= 32 and has_whole_rows else 16, 4, stages)


def prefill_rule(geometry: Geometry, options: Options, num_rows: int, backend: Backend) -> Row:
    """The largest tile of prefill that compiles without spills for every target.

    Found by compiling rows 16 to 128, tokens 16 to 64 and 4 or 8 warps.
    """
    block_dim = max(MIN_DOT, next_power_of_two(geometry.head_dim))
    is_pipelined = backend == "cuda" and geometry.dtype != torch.float32 and geometry.alignment >= WIDE_ALIGNMENT
    stages = 3 if is_pipelined else 1  # 3: the copies of two tiles
    if geometry.alignment < WIDE_ALIGNMENT:
        return Row(16, 16, 8, stages)
    if geometry.dtype == torch.float32:
        if block_dim <= 64:
            return Row(32, 32, 4, stages)
        if block_dim == 128:
            return Row(32, 16 if any(options) else 32, 8, stages)
        return Row(16, 16, 8, stages)
    if block_dim <= 64:
        return Row(64, 64, 4, stages)
    rows = 128 if block_dim == 128 else 64
    tokens = 16 if block_dim == 256 and geometry.block_size < 32 else 32
    if geometry.alignment < MAX_ALIGNMENT:
        rows //= 2  # whose elements are loaded in narrower pieces
    return Row(rows, tokens, 8, stages)
