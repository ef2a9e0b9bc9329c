"""The kernels that operators launch on real tensors, compiled for GPUs that are not there as a launch compiles them.

Triton specialises a launch by what it is given: pointers and integers that are multiples of 16, integers that are 1. A
build from a description of the arguments guesses that, and where it guesses wrong a gate reads code that never runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pagestream_kernels as kernels
import torch
from kernels.cases import DTYPES
from pagestream_kernels.aot import TARGETS, Target
from pagestream_kernels.decode_plan import FIXED_SPLIT_TOKENS, MAX_QUERY_LEN, plan_decode
from pagestream_kernels.prebuild import AbsentGPU
from pagestream_kernels.runtime import Variant, compiling_only, triton
from support.pairwise import Case
from torch import Tensor

TOKENS, SEQUENCES, BLOCKS = 48, 16, 24


@dataclass(frozen=True)
class Launched:
    """A kernel as a launch compiles it."""

    variant: Variant
    is_packed: bool
    """Whether all strides were multiples of 16, so that parts of rows are loaded whole."""
    compiled: Any

    @property
    def function(self) -> str:
        """The kernel's name."""
        name: str = self.variant.kernel.packed.fn.__name__
        return name


def launched(kernel: str, case: Case) -> list[Launched]:
    """Call an operator as a case says, and compile for its target what that launches."""
    target = TARGETS[case["target"]]
    found: list[Launched] = []

    def build(variant: Variant, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        function, _ = variant.kernel.choose(arguments)
        options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
        compiled = function.warmup(**arguments, **variant.constants, **options, grid=grid)
        found.append(Launched(variant, function is variant.kernel.packed, compiled))

    with _machine_with(target), compiling_only(), patch.object(Variant, "launch", build):
        _CALLS[kernel](case)
    return found


@contextmanager
def _machine_with(target: Target) -> Iterator[None]:
    triton.runtime.driver.set_active(AbsentGPU(target, [*TARGETS].index(target.name)))
    with patch.object(torch.version, "hip", "0" if target.backend == "hip" else None):
        yield


# -- operators, on tensors as the engine has them ---------------------------------------------------------------------


def _rows(case: Case, *sizes: int) -> Tensor:
    return torch.zeros(sizes, dtype=DTYPES[case.get("dtype", "bfloat16")])


def _kv_heads(case: Case) -> int:
    return 1 if case.get("num_heads") == 1 else 2


def _projected(case: Case, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as parts of one product's rows."""
    kv_heads = _kv_heads(case)
    packed = _rows(case, TOKENS, num_heads + 2 * kv_heads, case["head_dim"])
    query, key, value = packed.split((num_heads, kv_heads, kv_heads), dim=1)
    return query, key, value


def _cache(case: Case) -> tuple[Tensor, Tensor]:
    cache = _rows(case, 2, BLOCKS, _kv_heads(case), case["block_size"], case["head_dim"]).transpose(2, 3)
    return cache[0], cache[1]


def _float8_cache(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values that lie transposed within their pages, and the scales of both."""
    size = (BLOCKS, _kv_heads(case), case["block_size"], case["head_dim"])
    keys = torch.zeros(size, dtype=torch.float8_e4m3fn)
    values = (
        torch.zeros(size, dtype=torch.float8_e4m3fn).view(BLOCKS, _kv_heads(case), size[3], size[2]).transpose(2, 3)
    )
    scales = torch.ones(2, BLOCKS, _kv_heads(case))
    return keys.transpose(1, 2), values.transpose(1, 2), scales[0], scales[1]


def _tables() -> tuple[Tensor, Tensor, Tensor]:
    """Resident block tables, the sequences' rows in them, and their lengths."""
    rows = torch.arange(SEQUENCES)
    return torch.zeros(SEQUENCES + 1, BLOCKS, dtype=torch.int32), rows, torch.full((SEQUENCES,), 20, dtype=torch.int32)


def _options(case: Case, num_heads: int) -> dict[str, Any]:
    wanted = {"none": "", "window": "w", "slopes": "l", "all": "wcs"}[case["options"]]
    return {
        "scale": 0.1,
        "window": 17 if "w" in wanted else None,
        "soft_cap": 30.0 if "c" in wanted else None,
        "sinks": torch.zeros(num_heads) if "s" in wanted else None,
        "slopes": torch.zeros(num_heads) if "l" in wanted else None,
    }


def _decode(case: Case, keys: Tensor, values: Tensor, schedule: str, **scales: Tensor) -> None:
    num_heads = _kv_heads(case) * case["group_size"]
    query, _, _ = _projected(case, num_heads)
    tables, rows, lengths = _tables()
    options = _options(case, num_heads)
    cut: dict[str, Any] = {}
    if schedule == "rows":
        starts = 3 * torch.arange(SEQUENCES + 1, dtype=torch.int32)
        cut = {"cu_query_lens": starts, "max_query_len": MAX_QUERY_LEN}
    num_tokens = TOKENS if schedule == "rows" else SEQUENCES
    split = {"split_tokens": FIXED_SPLIT_TOKENS, "max_seq_len": 4096} if schedule == "fixed" else {}
    plan = plan_decode(lengths, num_kv_heads=_kv_heads(case), window=options["window"], **split, **cut)
    kernels.paged_decode_attention(
        query[:num_tokens], keys, values, tables, lengths, table_rows=rows, plan=plan, **options, **cut, **scales
    )


def _prefill(case: Case, keys: Tensor, values: Tensor, **scales: Tensor) -> None:
    num_heads = _kv_heads(case) * case["group_size"]
    query, _, _ = _projected(case, num_heads)
    tables, rows, lengths = _tables()
    starts = torch.tensor([0, 16, 32, 48], dtype=torch.int32)
    options = {**_options(case, num_heads), **scales}
    kernels.paged_prefill_attention(query, keys, values, tables, starts, lengths[:3], table_rows=rows[:3], **options)


def _call_decode(case: Case) -> None:
    _decode(case, *_cache(case), case["schedule"])


def _call_prefill(case: Case) -> None:
    _prefill(case, *_cache(case))


def _call_float8(case: Case) -> None:
    keys, values, key_scales, value_scales = _float8_cache(case)
    scales = {"key_scales": key_scales, "value_scales": value_scales}
    if case["operator"] == "prefill":
        _prefill(case, keys, values, **scales)
    else:
        _decode(case, keys, values, "rows" if case["operator"] == "rows" else "equal", **scales)


def _call_plan(case: Case) -> None:
    cut: dict[str, Any] = {}
    if case["rows"]:
        starts = 3 * torch.arange(SEQUENCES + 1, dtype=torch.int32)
        cut = {"cu_query_lens": starts, "max_query_len": MAX_QUERY_LEN}
    split = {"split_tokens": FIXED_SPLIT_TOKENS, "max_seq_len": 4096} if case["schedule"] == "fixed" else {}
    plan_decode(_tables()[2], num_kv_heads=_kv_heads(case), window=17 if case["window"] else None, **split, **cut)


def _turned(case: Case) -> tuple[tuple[Tensor, ...], Tensor, dict[str, Any]]:
    """Query, key, value, angles and positions; slots; and what else both rotating operators take."""
    head_dim = case["head_dim"]
    rotary_dim = head_dim if case["rotary"] == "full" else head_dim // 2
    places = torch.arange(TOKENS)
    norm = kernels.HeadNorm(_rows(case, head_dim), _rows(case, head_dim), 1e-6) if case["norm"] else None
    given = (*_projected(case, case["num_heads"]), torch.zeros(64, rotary_dim), places)
    return given, places, {"norm": norm, "interleaved": case["interleaved"]}


def _call_rope_and_cache(case: Case) -> None:
    given, slots, options = _turned(case)
    kernels.rope_and_cache(*given, *_cache(case), slots, **options)


def _call_rope_and_quantise(case: Case) -> None:
    given, slots, options = _turned(case)
    kernels.rope_and_quantise(*given, *_float8_cache(case), slots, **options)


def _call_copy_blocks(case: Case) -> None:
    layers = torch.zeros(2, BLOCKS, 4096, dtype=torch.bfloat16)
    kernels.copy_blocks(layers, layers, torch.zeros(3, 2, dtype=torch.int64))


def _call_rms_norm(case: Case) -> None:
    x, weight = _rows(case, TOKENS, case["width"]), _rows(case, case["width"])
    kernels.rms_norm(x, weight, eps=1e-6, residual=torch.zeros_like(x) if case["residual"] else None)


def _call_silu_and_mul(case: Case) -> None:
    kernels.silu_and_mul(_rows(case, TOKENS, 2 * case["width"]))


def _call_filter_and_draw(case: Case) -> None:
    ones, places = torch.ones(SEQUENCES), torch.arange(SEQUENCES)
    kernels.filter_and_draw(torch.zeros(SEQUENCES, 4096), ones, places, places, top_k=places, top_p=ones)


def _call_fixed_order_matmul(case: Case) -> None:
    x, weight = _rows(case, TOKENS, case["inputs"]), _rows(case, case["outputs"], case["inputs"])
    kernels.fixed_order_matmul(x, weight, _rows(case, case["outputs"]) if case["bias"] else None)


def _call_int8_matmul(case: Case) -> None:
    inputs, outputs = case["inputs"], 512
    group = case["group"] or inputs
    values, scales = torch.zeros(outputs, inputs, dtype=torch.int8), torch.ones(-(-inputs // group), outputs)
    kernels.int8_matmul(
        _rows(case, TOKENS, inputs), values, scales, group, _rows(case, outputs) if case["bias"] else None
    )


def _call_add_lora(case: Case) -> None:
    inputs, rank, size = case["inputs"], 16, 128
    places = [(part * size, size) for part in range(case["parts"])]
    table = kernels.LoraTable(places, inputs, 1, DTYPES[case["dtype"]], torch.device("cpu"))
    table.put(0, [kernels.LoraMatrices(_rows(case, rank, inputs), _rows(case, rank, size), 1.0) for _ in places])
    tiles = kernels.cut_tiles(torch.arange(TOKENS), [0, TOKENS], [0], rank)
    kernels.add_lora(_rows(case, TOKENS, size * case["parts"]), _rows(case, TOKENS, inputs), table, tiles)


_CALLS: Mapping[str, Callable[[Case], None]] = {
    "paged_decode": _call_decode,
    "paged_prefill": _call_prefill,
    "float8_attention": _call_float8,
    "plan_decode": _call_plan,
    "rope_and_cache": _call_rope_and_cache,
    "rope_and_quantise": _call_rope_and_quantise,
    "copy_blocks": _call_copy_blocks,
    "rms_norm": _call_rms_norm,
    "silu_and_mul": _call_silu_and_mul,
    "filter_and_draw": _call_filter_and_draw,
    "fixed_order_matmul": _call_fixed_order_matmul,
    "int8_matmul": _call_int8_matmul,
    "add_lora": _call_add_lora,
}
