"""Triton kernels for paged attention and its neighbours, each with a torch reference."""

from pagestream_kernels.copy_blocks import copy_blocks, copy_blocks_reference
from pagestream_kernels.decode_plan import DecodePlan, plan_decode, plan_decode_reference
from pagestream_kernels.errors import KernelArgumentError, KernelError, KernelUnavailableError
from pagestream_kernels.filter_and_draw import filter_and_draw, filter_and_draw_reference
from pagestream_kernels.fixed_order_matmul import fixed_order_matmul, fixed_order_matmul_reference
from pagestream_kernels.int8_matmul import int8_matmul, int8_matmul_reference, takes_groups
from pagestream_kernels.lora import LoraMatrices, LoraTable, LoraTiles, add_lora, add_lora_reference, cut_tiles
from pagestream_kernels.paged_decode import paged_decode_attention, paged_decode_attention_reference
from pagestream_kernels.paged_prefill import (
    PrefillPlan,
    paged_prefill_attention,
    paged_prefill_attention_reference,
    plan_prefill,
)
from pagestream_kernels.paging import BLOCK_SIZES, MAX_HEAD_DIM
from pagestream_kernels.rms_norm import rms_norm, rms_norm_reference
from pagestream_kernels.rope_and_cache import HeadNorm, rope_and_cache, rope_and_cache_reference
from pagestream_kernels.rope_and_quantise import rope_and_quantise, rope_and_quantise_reference
from pagestream_kernels.runtime import INTERPRETED
from pagestream_kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference
from pagestream_kernels.tables.rows import programs_per_processor

__all__ = [
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
]
