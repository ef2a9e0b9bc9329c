"""Compile the kernels that published models need, without a GPU, into a Triton cache; and take them from there.

`python -m pagestream_kernels.prebuild --out FOLDER` is what the CUDA image's build runs. Each operator
is called as the engine calls it, on tensors of the model's shapes with launches turned into compilations, so that a
launch finds what was compiled: Triton's key has the types, and which pointers and strides are multiples of 16.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagestream_kernels.aot import TARGETS, Target
from pagestream_kernels.decode_plan import FIXED_SPLIT_TOKENS, MAX_QUERY_LEN, plan_decode
from pagestream_kernels.errors import KernelUnavailableError
from pagestream_kernels.filter_and_draw import filter_and_draw
from pagestream_kernels.fixed_order_matmul import MANY_OUTPUTS, fixed_order_matmul
from pagestream_kernels.paged_decode import paged_decode_attention
from pagestream_kernels.paged_prefill import paged_prefill_attention
from pagestream_kernels.rms_norm import rms_norm
from pagestream_kernels.rope_and_cache import HeadNorm, rope_and_cache
from pagestream_kernels.runtime import INTERPRETED, compiling_only, triton
from pagestream_kernels.silu_and_mul import silu_and_mul
from pagestream_kernels.tables.rows import chips, load_table, using_table

PREBUILT = Path(__file__).parent / "prebuilt"
"""Where an image keeps them."""
_TOKENS, _SEQUENCES, _BLOCKS, _PREFILLS = 32, 16, 32, 4  # any: a launch's counts are not part of Triton's key


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that its kernels depend on."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_bias: bool = False
    """Of query, key and value."""
    has_head_norm: bool = False
    """Of query and key, before they are rotated."""
    block_size: int = 64
    dtype: torch.dtype = torch.bfloat16


SHAPES = (
    ModelShape(2048, 8192, 32, 8, 64),  # Llama 3.2 1B
    ModelShape(3072, 8192, 24, 8, 128),  # Llama 3.2 3B
    ModelShape(4096, 14336, 32, 8, 128),  # Llama 3.1 8B, Mistral 7B
    ModelShape(8192, 28672, 64, 8, 128),  # Llama 3.1 70B
    ModelShape(896, 4864, 14, 2, 64, has_bias=True),  # Qwen2.5 0.5B
    ModelShape(1536, 8960, 12, 2, 128, has_bias=True),  # Qwen2.5 1.5B
    ModelShape(3584, 18944, 28, 4, 128, has_bias=True),  # Qwen2.5 7B
    ModelShape(4096, 12288, 32, 8, 128, has_head_norm=True),  # Qwen3 8B
)
"""Sizes from the configurations that their publishers ship. Other models compile at their first step."""


class AbsentGPU:
    """What Triton asks of a driver in order to compile: the target, and a device number by which it keeps results."""

    def __init__(self, target: Target, number: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget(target.backend, target.arch, target.warp_size)
        self._number = number

    def get_current_target(self) -> object:
        return self._target

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def compile_shapes(shapes: Iterable[ModelShape], targets: Sequence[Target]) -> None:
    """Compile every kernel of the shapes for each target into Triton's cache folder of this process.

    Raises:
        KernelUnavailableError: this process has no Triton, or interprets.
    """
    if triton is None or INTERPRETED:
        raise KernelUnavailableError("compiling ahead of time needs Triton, imported without TRITON_INTERPRET=1")
    shapes = tuple(shapes)
    for number, target in enumerate(targets):
        triton.runtime.driver.set_active(AbsentGPU(target, number))
        for table in [None, *(table for table in map(load_table, chips()) if table.target == target.name)]:
            with compiling_only(), using_table(table):
                for shape in shapes:
                    _call_each(shape)
                    _call_linears(shape)


def _call_each(shape: ModelShape) -> None:
    """Call all operators but the linears, attention as in both modes."""

    def tensor(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=shape.dtype)

    heads, kv_heads, width = shape.num_heads, shape.num_kv_heads, shape.head_dim
    cache = tensor(2, _BLOCKS, kv_heads, shape.block_size, width).transpose(2, 3)
    keys, values = cache[0], cache[1]
    # Query, key and value are parts of one product's rows.
    packed = tensor(_TOKENS, heads + 2 * kv_heads, width)
    query, key, value = packed[:, :heads], packed[:, heads : heads + kv_heads], packed[:, heads + kv_heads :]
    long = torch.zeros(_TOKENS, dtype=torch.int64)
    tables = torch.zeros(_SEQUENCES, _BLOCKS, dtype=torch.int32)
    rows = torch.arange(_SEQUENCES)  # of the resident tables
    lengths = torch.ones(_SEQUENCES, dtype=torch.int32)
    scale = width**-0.5

    hidden = tensor(_TOKENS, shape.hidden)
    weight = tensor(shape.hidden)
    rms_norm(hidden, weight, eps=1e-6)
    rms_norm(hidden, weight, eps=1e-6, residual=tensor(_TOKENS, shape.hidden))
    norm = HeadNorm(tensor(width), tensor(width), 1e-6) if shape.has_head_norm else None
    rope_and_cache(query, key, value, torch.zeros(64, width), long, keys, values, long, norm=norm)
    # Prefills first, then decodes: where a part begins is not part of the key either.
    first, decodes = slice(_PREFILLS), slice(_PREFILLS, _SEQUENCES)
    starts = torch.arange(_PREFILLS + 1, dtype=torch.int32)
    paged_prefill_attention(
        query[first], keys, values, tables, starts, lengths[first], table_rows=rows[first], scale=scale
    )
    bound = {"max_seq_len": _BLOCKS * shape.block_size}
    replayed = {"cu_query_lens": torch.arange(_SEQUENCES - _PREFILLS + 1, dtype=torch.int32)}
    modes: tuple[dict[str, Any], ...] = (
        {},
        {"split_tokens": FIXED_SPLIT_TOKENS, **bound},
        # Outputs that are computed again, in the deterministic mode.
        {"split_tokens": FIXED_SPLIT_TOKENS, **bound, **replayed, "max_query_len": MAX_QUERY_LEN},
    )
    for options in modes:
        plan = plan_decode(lengths[decodes], num_kv_heads=kv_heads, **options)
        given = {name: options[name] for name in ("cu_query_lens", "max_query_len") if name in options}
        paged_decode_attention(
            *(query[decodes], keys, values, tables, lengths[decodes]),
            **given,
            table_rows=rows[decodes],
            scale=scale,
            plan=plan,
        )
    silu_and_mul(tensor(_TOKENS, 2 * shape.intermediate))
    filter_and_draw(torch.zeros(_SEQUENCES, 128), torch.ones(_SEQUENCES), long[:_SEQUENCES], long[:_SEQUENCES])


def _call_linears(shape: ModelShape) -> None:
    """Call the linears of the deterministic mode: of attention, of the feed-forward network, and the head."""
    heads = shape.num_heads * shape.head_dim
    projected = heads + 2 * shape.num_kv_heads * shape.head_dim
    for num_outputs, num_inputs, has_bias in (
        (projected, shape.hidden, shape.has_bias),
        (shape.hidden, heads, False),
        (2 * shape.intermediate, shape.hidden, False),
        (shape.hidden, shape.intermediate, False),
        (MANY_OUTPUTS, shape.hidden, False),
    ):
        # A build is for few outputs or many, however many.
        weight = torch.empty(min(num_outputs, MANY_OUTPUTS), num_inputs, dtype=shape.dtype)
        bias = torch.empty(len(weight), dtype=shape.dtype) if has_bias else None
        fixed_order_matmul(torch.empty(_TOKENS, num_inputs, dtype=shape.dtype), weight, bias)


def take_prebuilt(folder: Path = PREBUILT) -> int:
    """Copy prebuilt kernels into Triton's cache folder where it lacks them. Returns how many were copied.

    Raises:
        OSError: the cache folder can't be written.
    """
    if triton is None or not folder.is_dir():
        return 0
    cache = Path(triton.knobs.cache.dir)
    cache.mkdir(parents=True, exist_ok=True)
    copied = 0
    for source in folder.iterdir():
        if (cache / source.name).exists():
            continue
        with tempfile.TemporaryDirectory(dir=cache) as scratch:  # whole or not at all: another engine may read it
            made = Path(scratch, source.name)
            shutil.copytree(source, made)
            _relocate(made, cache / source.name)
            try:
                made.rename(cache / source.name)
            except OSError:  # another engine was faster
                if not (cache / source.name).exists():
                    raise
            else:
                copied += 1
    return copied


def _relocate(folder: Path, target: Path) -> None:
    """Let the list of a kernel's files, which has absolute paths, point to where the files will be."""
    for group in folder.glob("__grp__*.json"):
        listed = json.loads(group.read_text())
        listed["child_paths"] = {name: str(target / name) for name in listed["child_paths"]}
        group.write_text(json.dumps(listed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Compile kernels for GPUs that are not there.")
    parser.add_argument("--out", type=Path, default=PREBUILT, metavar="FOLDER")
    parser.add_argument("--targets", default="sm_80,sm_90,sm_100", metavar="NAMES")
    given = parser.parse_args(arguments)
    unknown = set(given.targets.split(",")) - set(TARGETS)
    if unknown:
        parser.error(f"--targets: {', '.join(sorted(unknown))} was given, {', '.join(TARGETS)} are known")
    given.out.mkdir(parents=True, exist_ok=True)
    triton.knobs.cache.dir = str(given.out.resolve())
    compile_shapes(SHAPES, [TARGETS[name] for name in given.targets.split(",")])
    print(f"{sum(1 for _ in given.out.iterdir())} kernels in {given.out}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
