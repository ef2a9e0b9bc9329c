"""float16 is converted as IEEE 754 says, with the processor's instructions for it and without."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pagestream_engine.attention import Rotation
from pagestream_engine.attention.base import LayerCache
from pagestream_engine.attention.native.attention import NativeKernels, Write
from pagestream_engine.attention.native.levels import LEVELS, AttentionLevel, library_for
from pagestream_engine.cpu import instruction_sets, read_cpuinfo
from pagestream_engine.native_build import compile_into, find_compiler

DIM = 32
HERE = LEVELS.get(platform.machine(), ())
VARIANTS: list[tuple[AttentionLevel, tuple[str, ...]]] = [(level, ()) for level in HERE]
if platform.machine() == "x86_64":
    VARIANTS.append((HERE[-1], ("-mno-f16c",)))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.builds,
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
]


@pytest.mark.parametrize(("level", "flags"), VARIANTS, ids=["".join((each.name, *flags)) for each, flags in VARIANTS])
def test_every_value_is_widened_and_every_product_rounded(
    tmp_path: Path, level: AttentionLevel, flags: tuple[str, ...]
) -> None:
    """A rotation with sine 0 multiplies each element by its cosine: one product, exact in float64, and one rounding."""
    if not level.flags <= instruction_sets(read_cpuinfo()):
        pytest.skip(f"this processor lacks {level.name}")
    compiler = find_compiler()
    assert compiler is not None
    library = library_for(DIM, level)
    made = compile_into(tmp_path, replace(library, flags=(*library.flags, *flags)), compiler)
    kernels = NativeKernels(ctypes.CDLL(str(made)), torch.float16)
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.float16)
    keys = values[values.isfinite()].view(-1, 1, DIM)
    cos = torch.cat((torch.ones(1, DIM // 2), torch.rand(200, DIM // 2) * torch.logspace(-6, 1, 200)[:, None]))
    rotation = Rotation(torch.cat((cos, torch.zeros_like(cos)), dim=1))
    positions = torch.arange(len(keys)) % len(cos)
    cache = LayerCache(*torch.zeros(2, len(keys), 1, 1, DIM, dtype=torch.float16))
    kernels.rope_and_cache(keys.clone(), keys, keys, Write(cache, torch.arange(len(keys)), positions, rotation))
    factors = cos[positions].repeat(1, 2).view(-1, 1, DIM)
    expected = (keys.float() * factors).to(torch.float16)
    assert torch.equal(cache.keys.view(-1, 1, DIM), expected)
    assert torch.equal(cache.values.view(-1, 1, DIM), keys)
    assert expected.isinf().any()
    assert ((expected != 0) & (expected.abs() < 6e-5)).any()
