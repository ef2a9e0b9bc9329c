"""What a launch is looked up by: one key for all parts of a tensor and all shapes of a step."""

from __future__ import annotations

import pytest
from support.kernels import builds as kernel_builds
from support.kernels.worker import KernelWorker
from support.pairwise import sampled

pytestmark = pytest.mark.builds

SIZES = {
    "paged_decode": (128, 80, 5),  # of a head; rows of 4 * 5 elements are not at multiples of 16 bytes
    "plan_decode": (100,),  # of the window
    "paged_prefill": (128, 80, 5),
    "rope_and_cache": (128, 80, 6),
    "rms_norm": (256, 123),
    "rms_norm_of_heads": (128, 20),
    "silu_and_mul": (256, 123),
    "filter_and_draw": (256, 123),
    "fixed_order_matmul": (256, 123),
    "int8_matmul": (256,),
    "add_lora": (256,),
}


@pytest.mark.parametrize(("operator", "size"), [(name, size) for name, sizes in SIZES.items() for size in sizes])
def test_parts_and_shapes_have_one_key(compiler: KernelWorker, operator: str, size: int) -> None:
    counts = compiler.run("launch_keys", {"operator": operator, "size": size})
    assert len(counts) == {"paged_decode": 3, "add_lora": 2}.get(operator, 1)  # plan, attention, merge; both products
    assert set(counts.values()) == {2 if operator == "paged_prefill" else 1}, counts  # prefill: for results of NaN


@pytest.mark.parametrize(
    ("operator", "changes"),
    sampled(
        [
            *((name, {}) for name in ("paged_decode", "paged_prefill", "rope_and_cache", "rms_norm", "silu_and_mul")),
            *(("paged_decode", {"head_dim": size, "block_size": 64}) for size in (40, 100, 125, 200)),
            *(("paged_prefill", {"head_dim": size, "dtype": "float32"}) for size in (40, 100, 125)),
            *(("paged_prefill", {"head_dim": size}) for size in (200, 250)),
        ]
    ),
)
def test_kernel_for_odd_strides_compiles_within_the_targets_limits(
    compiler: KernelWorker, operator: str, changes: dict[str, int | str]
) -> None:
    case = {name: values[1 % len(values)] for name, values in kernel_builds.FACTORS[operator].items()}
    usages = compiler.run("loose_builds", {**case, **changes, "operator": operator, "target": "sm_90"})
    assert all(usage["registers"] > 0 for usage in usages.values())


def test_stride_beyond_31_bits_is_passed_whole(compiler: KernelWorker) -> None:
    near, far = (compiler.run("launch_key_of_stride", {"stride": stride})["key"] for stride in (2**31 - 16, 2**31))
    assert "('i64', 'D')" not in near
    assert "('i64', 'D')" in far


@pytest.mark.parametrize(("operator", "size"), [(name, sizes[0]) for name, sizes in SIZES.items()])
def test_launcher_gives_the_driver_what_triton_gives_it(compiler: KernelWorker, operator: str, size: int) -> None:
    found = compiler.run("driver_calls", {"operator": operator, "size": size})
    assert found["equal"] == found["launches"] > 0
    assert found["through_triton"] == {"paged_decode": 3, "paged_prefill": 2, "add_lora": 2}.get(operator, 1)


def test_launcher_tells_dtypes_strides_and_alignments_apart(compiler: KernelWorker) -> None:
    found = compiler.run("driver_calls_of_mixture", {})
    assert found["equal"] == found["launches"] == 2 * found["through_triton"]
