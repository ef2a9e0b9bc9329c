"""`make kernel-tables`: builds every way of cutting the attention kernels, times them where a GPU is there, and writes
the tables.

Worth a time are those that build without spills and leave a processor busy. A table names the kernels that its rows
were built from by digests of their sources.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagestream_kernels.aot import TARGETS, CompileError, Target, check_usage, compile_variant, inspect_loop
from pagestream_kernels.decode_plan import MIN_SHARE, plan_decode
from pagestream_kernels.paged_decode import attend_variant, paged_decode_attention
from pagestream_kernels.paged_prefill import paged_prefill_attention, prefill_variant
from pagestream_kernels.paging import FLOAT8, Geometry, Options
from pagestream_kernels.runtime import Variant, triton
from pagestream_kernels.tables.rows import CHIPS, PROGRAMS_PER_PROCESSOR, ChipTable, Row, RowKey, using_table

BUILT = "built, not timed"
TIMED = "timed"
MAX_TIMED = 6  # candidates of a row


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU that gets a table."""

    target: str  # of `aot.TARGETS`
    names: tuple[str, ...]  # parts of the name that the driver gives


KNOWN: Mapping[str, Chip] = {
    "a100": Chip("sm_80", ("A100",)),
    "h100": Chip("sm_90", ("H100",)),
    "h200": Chip("sm_90", ("H200",)),  # GH200 contains it, too
    "b200": Chip("sm_100", ("B200",)),  # and GB200
    "mi300x": Chip("gfx942", ("MI300X",)),
}


@lru_cache(maxsize=1024)
def built_rows(target: str, key: RowKey, count: int) -> tuple[Row, ...]:
    """The first `count` candidates that pass the filter."""
    found: list[Row] = []
    for row in candidates(key, TARGETS[target]):
        built = passes(key, row, TARGETS[target])
        if built is not None:
            found.append(built)
        if len(found) == count:
            break
    return tuple(found)


def make_rows(chip: Chip, kept: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The entries of a chip's table; those of `kept` are taken over."""
    has_gpu = torch.cuda.is_available() and any(name in torch.cuda.get_device_name() for name in chip.names)
    known = {RowKey(*(entry[name] for name in RowKey._fields)): dict(entry) for entry in kept}
    for key in row_keys(chip.target):
        if key in known:
            yield known[key]
            continue
        print(*key, file=sys.stderr)  # noqa: T201
        rows = built_rows(chip.target, key, MAX_TIMED if has_gpu else 1)
        if not rows:
            continue  # the rule for unknown chips serves it
        row = fastest(key, rows, torch.device("cuda"), microseconds) if has_gpu else rows[0]
        yield {**key._asdict(), **row._asdict(), "chosen": TIMED if has_gpu else BUILT}


def write_table(name: str, folder: Path, *, again: bool) -> Path:
    """Write the table of a chip; rows of kernels that have not changed are taken over unless `again`."""
    path, chip = folder / f"{name}.json", KNOWN[name]
    now = {operator: source_hash(operator) for operator in KERNELS}
    kept: list[Mapping[str, Any]] = []
    if path.exists() and not again:
        before = json.loads(path.read_text())
        same = [operator for operator in now if before["sources"].get(operator) == now[operator]]
        kept = [entry for entry in before["rows"] if entry["operator"] in same]
    head = {"names": chip.names, "target": chip.target, "triton": triton.__version__, "sources": now, "rule": RULE}
    rows = ",\n".join("  " + json.dumps(entry) for entry in make_rows(chip, kept))
    path.write_text(json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + rows + "\n ]\n}\n")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Write the tables of tile sizes.")
    parser.add_argument("chips", nargs="*", metavar="CHIP", help=f"of {', '.join(KNOWN)}; default: all")
    parser.add_argument("--out", type=Path, default=CHIPS, metavar="FOLDER")
    parser.add_argument("--again", action="store_true", help="also the rows of kernels that have not changed")
    given = parser.parse_args(arguments)
    unknown = set(given.chips) - set(KNOWN)
    if unknown:
        parser.error(f"expected chips of {', '.join(KNOWN)}, got {', '.join(sorted(unknown))}")
    for chip in given.chips or KNOWN:
        print(write_table(chip, given.out, again=given.again), flush=True)  # noqa: T201
    return 0


DTYPES = ("bfloat16",)
FLOAT8_TARGETS = ("sm_90", "sm_100")  # that convert it by instructions
HEAD_DIMS = (128, 64)
PAGES = (64,)
DECODE_GROUPS = (16, 64)  # query rows a KV head: one tile of tensor cores, and several
PREFILL_GROUP = 64
MIN_WARPS = 8  # on a processor, so that one's softmax runs beside another's products
RULE = (
    "the first of the candidates (most query rows for prefill, most KV tokens for decode, then the other, then fewest "
    "warps) that builds within the target's shared memory, without spills, without options and with all of them, with "
    f"two buffers and tensor-core instructions where copies are pipelined, and of which {MIN_WARPS} warps fit a "
    "processor"
)


def row_keys(target: str) -> Iterator[RowKey]:
    """The rows of a table of a chip of `target`."""
    dtypes = (*DTYPES, "float8_e4m3fn") if target in FLOAT8_TARGETS else DTYPES
    for dtype, head_dim, page in product(dtypes, HEAD_DIMS, PAGES):
        for group in DECODE_GROUPS:
            yield RowKey("paged_decode", dtype, head_dim, group, page)
        yield RowKey("paged_prefill", dtype, head_dim, PREFILL_GROUP, page)


def candidates(key: RowKey, target: Target) -> Iterator[Row]:
    """Ways of cutting a kernel, the most wanted first."""
    stages = 3 if target.backend == "cuda" else 1
    if key.operator == "paged_prefill":
        for rows, tokens, warps in product((128, 64, 32, 16), (64, 32, 16), (4, 8)):
            yield Row(rows, tokens, warps, stages)
        return
    most_rows = (16,) if key.group <= 16 else (64, 32, 16)
    for tokens, rows, warps in product((64, 32, 16), most_rows, (4, 8)):
        yield Row(rows, tokens, warps, stages)


def passes(key: RowKey, row: Row, target: Target) -> Row | None:
    """Build a candidate; return it with the programs that a processor runs at a time, or None if it fails."""
    programs = PROGRAMS_PER_PROCESSOR
    for options in (Options(), Options(window=True, soft_cap=True, sinks=True)):
        variant = variant_of(key, row, target, options)
        try:
            usage = compile_variant(variant, target)
        except CompileError:  # Triton has no code for this tile on this target
            return None
        if check_usage(usage, target):
            return None
        threads = row.warps * target.warp_size
        fitting = min(
            target.registers // (usage.registers * threads), target.shared_total // max(1, usage.shared_bytes)
        )
        if fitting * row.warps < MIN_WARPS:
            return None
        programs = min(programs, fitting)
        if target.backend == "cuda":
            loop = inspect_loop(variant, target)
            if loop.buffers < 2 or not loop.copies_in_flight or not loop.products:
                return None
    return row._replace(programs=programs)


def variant_of(key: RowKey, row: Row, target: Target, options: Options) -> Variant:
    """What a launch of a row runs."""
    has_scales = key.dtype == "float8_e4m3fn"
    dtype = torch.bfloat16 if has_scales else getattr(torch, key.dtype)
    geometry = Geometry(key.head_dim, key.group, key.page, dtype, has_scales=has_scales)
    if key.operator == "paged_prefill":
        return prefill_variant(geometry, target.backend, options, row=row, has_table_rows=True)
    build = partial(attend_variant, geometry, target.backend, options, min_share=MIN_SHARE, has_lse=True)
    return build(row=row, has_table_rows=True)


KV_HEADS = 8
Timer = Callable[[Callable[[], object]], float]


class Sizes(NamedTuple):
    """Of what is timed."""

    batch: int  # of decode
    context: int  # tokens, of decode
    prompt: int  # tokens, of prefill


SIZES = Sizes(32, 8192, 4096)


def fastest(key: RowKey, rows: Sequence[Row], device: torch.device, measure: Timer, sizes: Sizes = SIZES) -> Row:
    """Return the row with the least time.

    Args:
        key: what the rows are for.
        rows: at least one.
        measure: gives a call's time, in any unit.
    """
    times = []
    for row in rows:
        with using_table(ChipTable((), "", {}, {key: row}, {})):
            times.append(measure(workload(key, row, device, sizes)))
    return rows[min(range(len(rows)), key=times.__getitem__)]


def microseconds(run: Callable[[], object]) -> float:
    """Median time of a call on the GPU."""
    from triton.testing import do_bench

    return 1e3 * float(do_bench(run, return_mode="median"))


def workload(key: RowKey, row: Row, device: torch.device, sizes: Sizes) -> Callable[[], object]:
    """A call of the operator: decode of 32 sequences of 8k, or prefill of one prompt of 4k."""
    has_scales = key.dtype == "float8_e4m3fn"
    dtype = torch.bfloat16 if has_scales else getattr(torch, key.dtype)
    is_decode = key.operator == "paged_decode"
    num_seqs, length = (sizes.batch, sizes.context) if is_decode else (1, sizes.prompt)
    num_blocks = -(-length // key.page)
    shape = (num_seqs * num_blocks, KV_HEADS, key.page, key.head_dim)
    keys, values = (torch.randn(shape, device=device).transpose(1, 2) for _ in range(2))
    scales: Tensor | None = None
    if has_scales:
        values = values.transpose(1, 3).contiguous().transpose(1, 3)
        keys, values = keys.to(FLOAT8), values.to(FLOAT8)
        scales = torch.ones(shape[:2], device=device)
    else:
        keys, values = keys.to(dtype), values.to(dtype)
    order = torch.randperm(len(keys), device=device, dtype=torch.int32)
    tables = order.view(num_seqs, num_blocks)
    lengths = torch.full((num_seqs,), length, dtype=torch.int32, device=device)
    num_rows = num_seqs if is_decode else length
    query = torch.randn(num_rows, KV_HEADS * (key.group if is_decode else 8), key.head_dim, device=device).to(dtype)
    if is_decode:
        plan = plan_decode(lengths, num_kv_heads=KV_HEADS, programs_per_processor=row.programs)
        decode = partial(paged_decode_attention, query, keys, values, tables, lengths, scale=0.1, plan=plan)
        return partial(decode, key_scales=scales, value_scales=scales)
    starts = torch.tensor([0, length], dtype=torch.int32, device=device)
    prefill = partial(paged_prefill_attention, query, keys, values, tables, starts, lengths, scale=0.1)
    return partial(prefill, key_scales=scales, value_scales=scales)


PACKAGE = Path(__file__).resolve().parent
KERNELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "paged_decode": ("_attend_kernel", ("paged_decode.py", "decode_plan.py", "tiles.py", "runtime.py")),
    "paged_prefill": ("_prefill_kernel", ("paged_prefill.py", "tiles.py", "runtime.py")),
}
"""By operator the kernel that its rows cut, and the modules with the functions that it calls."""


def source_hash(operator: str) -> str:
    """16 hexadecimal digits that change with the code of an operator's kernel, comments and docstrings left out."""
    kernel, modules = KERNELS[operator]
    functions = {name: node for module in modules for name, node in _compiled_functions(PACKAGE / module)}
    reached = [kernel]
    for name in reached:
        called = dict.fromkeys(node.id for node in ast.walk(functions[name]) if isinstance(node, ast.Name))
        reached += [other for other in called if other in functions and other not in reached]
    return hashlib.sha256("\n".join(ast.unparse(functions[name]) for name in reached).encode()).hexdigest()[:16]


def _compiled_functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module that Triton compiles, without their docstrings, by name."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and any(map(_is_compiled, node.decorator_list)):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            yield node.name, node


def _is_compiled(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(function, ast.Name) and function.id in ("jit", "kernel")


if __name__ == "__main__":
    sys.exit(main())
