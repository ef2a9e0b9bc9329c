from __future__ import annotations

import subprocess
import sys

import pagestream_kernels

NAMES = {
    "BLOCK_SIZES",
    "INTERPRETED",
    "MAX_HEAD_DIM",
    "DecodePlan",
    "HeadNorm",
    "KernelArgumentError",
    "KernelError",
    "KernelUnavailableError",
    "LoraMatrices",
    "LoraTable",
    "LoraTiles",
    "PrefillPlan",
    "add_lora",
    "add_lora_reference",
    "copy_blocks",
    "copy_blocks_reference",
    "cut_tiles",
    "filter_and_draw",
    "filter_and_draw_reference",
    "fixed_order_matmul",
    "fixed_order_matmul_reference",
    "int8_matmul",
    "int8_matmul_reference",
    "paged_decode_attention",
    "paged_decode_attention_reference",
    "paged_prefill_attention",
    "paged_prefill_attention_reference",
    "plan_decode",
    "plan_decode_reference",
    "plan_prefill",
    "programs_per_processor",
    "rms_norm",
    "rms_norm_reference",
    "rope_and_cache",
    "rope_and_cache_reference",
    "rope_and_quantise",
    "rope_and_quantise_reference",
    "silu_and_mul",
    "silu_and_mul_reference",
    "takes_groups",
}

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # an import of it fails as where it is not installed
import torch, pagestream_kernels as kernels
gate_up = torch.ones(2, 8)
assert kernels.silu_and_mul_reference(gate_up).shape == (2, 4)
try:
    kernels.silu_and_mul(gate_up)
except kernels.KernelUnavailableError as error:
    assert "Triton is not installed; use silu_and_mul_reference" in str(error), error
else:
    raise SystemExit("the kernel ran without Triton")
"""


def test_exported_names() -> None:
    assert set(pagestream_kernels.__all__) == NAMES
    for name in NAMES:
        assert hasattr(pagestream_kernels, name)
        assert getattr(pagestream_kernels, name).__doc__


def test_references_work_without_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False, timeout=90
    )
    assert done.returncode == 0, done.stderr
