from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kernels.cache import ResultCache
from support.kernels.worker import KernelWorker

FEW = {
    "test_add_lora.py::test_kernel_matches_reference": 0,
    "test_aot.py::test_decode_copies_a_page_ahead_in_a_short_loop": 0,
    "test_aot.py::test_kernel_compiles_within_the_targets_limits": 1,
    "test_benchmarks.py::test_benchmark_runs_its_smallest_workload": 0,
    "test_decode_plan.py::test_a_plan_is_one_launch_and_no_operation": 0,
    "test_decode_plan.py::test_any_batch_is_divided_as_the_model_says": 0,
    "test_fixed_order_matmul.py::test_loop_copies_ahead_and_multiplies_on_tensor_cores": 0,
    "test_float8_cache.py::test_kernel_matches_reference": 1,
    "test_float8_cache.py::test_loop_copies_ahead_and_is_short": 0,
    "test_float8_cache.py::test_written_pages_match_reference": 0,
    "test_kernel_worker.py::test_failure_names_its_case": 0,
    "test_kernel_worker.py::test_worker_that_died_fails_one_case": 0,
    "test_launch_keys.py::test_kernel_for_odd_strides_compiles_within_the_targets_limits": 1,
    "test_launch_keys.py::test_launcher_gives_the_driver_what_triton_gives_it": 0,
    "test_paged_decode.py::test_fixed_splits_give_a_row_the_same_bits_in_any_batch": 0,
    "test_paged_prefill.py::test_a_value_that_is_not_finite_reaches_only_who_sees_it": 1,
    "test_paged_prefill.py::test_chunks_give_a_token_the_same_bits": 0,
    "test_tables.py::test_the_fastest_candidate_is_chosen": 0,
    "test_wide_offsets.py::test_offsets_pass_31_bits": 3,
}
"""Cases of long tests that `make test` runs; `make kernel-test` runs all of them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the other cases as slow, before marks are selected by."""
    seen: Counter[str] = Counter()
    for item in items:
        name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
        if item.path.parent == Path(__file__).parent and name in FEW:
            seen[name] += item.get_closest_marker("slow") is None
            if seen[name] > FEW[name]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[KernelWorker]:
    """A process in which Triton interprets."""
    with KernelWorker("interpret") as worker:
        yield worker


@pytest.fixture(scope="session")
def compiler() -> Iterator[KernelWorker]:
    """A process in which Triton compiles."""
    with KernelWorker("compile") as worker:
        yield worker


@pytest.fixture(scope="session")
def build_cache() -> ResultCache:
    """Builds that passed with the present sources."""
    return ResultCache("compile")
