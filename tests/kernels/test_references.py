"""The torch references by their definitions, and what kernels and references refuse; nothing is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pagestream_kernels as kernels
import pytest
import torch
from torch import Tensor

F32, F16, I32 = torch.float32, torch.float16, torch.int32
CPU = torch.device("cpu")


def pages(block_size: int = 16, head_dim: int = 64) -> dict[str, Any]:
    """Arguments of decode over two sequences."""
    return {
        "query": torch.randn(2, 4, head_dim),
        "key_cache": torch.randn(8, block_size, 2, head_dim),
        "value_cache": torch.randn(8, block_size, 2, head_dim),
        "block_tables": torch.tensor([[3, 1, -1], [0, 7, 2]], dtype=I32),
        "seq_lens": torch.tensor([20, 48], dtype=I32),
        "scale": 0.125,
    }


def chunks() -> dict[str, Any]:
    return {**pages(), "query": torch.randn(25, 4, 64), "cu_query_lens": torch.tensor([0, 20, 25], dtype=I32)}


def float8_pages() -> dict[str, Any]:
    cache = torch.zeros(3, 64, 2, 64).to(torch.float8_e4m3fn)
    tables = torch.tensor([[2, 1], [0, 1]], dtype=I32)
    scales = {"key_scales": torch.ones(3, 2), "value_scales": torch.ones(3, 2)}
    return {**pages(), "key_cache": cache, "value_cache": cache, "block_tables": tables, **scales}


def turns() -> dict[str, Any]:
    angles = torch.arange(50)[:, None] * 0.1 ** torch.arange(4)
    return {
        "query": torch.randn(3, 4, 8),
        "key": torch.randn(3, 2, 8),
        "value": torch.randn(3, 2, 8),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=1),
        "positions": torch.tensor([0, 7, 49]),
        "key_cache": torch.zeros(2, 16, 2, 8),
        "value_cache": torch.zeros(2, 16, 2, 8),
        "slot_mapping": torch.tensor([17, -1, 0]),
    }


def draws() -> dict[str, Any]:
    ones = torch.ones(5, dtype=torch.int64)
    return {"logits": torch.ones(5, 8), "temperatures": torch.ones(5), "seeds": ones, "positions": ones}


ARGUMENTS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "paged_decode_attention": pages,
    "paged_prefill_attention": chunks,
    "rope_and_cache": turns,
    "rms_norm": lambda: {"x": torch.ones(5, 8), "weight": torch.ones(8), "eps": 1e-5},
    "silu_and_mul": lambda: {"gate_up": torch.ones(5, 8)},
    "filter_and_draw": draws,
    "fixed_order_matmul": lambda: {"x": torch.ones(5, 8), "weight": torch.ones(4, 8)},
    "plan_decode": lambda: {"seq_lens": torch.ones(1, dtype=I32), "num_kv_heads": 2},
    "copy_blocks": lambda: {
        "target": torch.zeros(2, 3, 8),
        "source": torch.zeros(2, 3, 8),
        "pairs": torch.tensor([[1, 0]]),
    },
}
DECODE, PREFILL = "paged_decode_attention", "paged_prefill_attention"
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (DECODE, {"query": torch.randn(2, 4, 64, dtype=torch.float64)}, "^query: expected .*float64"),
    (DECODE, {"query": [1.0]}, r"query: expected a torch\.Tensor, got list"),
    (DECODE, {"query": torch.randn(2, 64, 4).transpose(1, 2)}, "query: expected stride 1"),
    (DECODE, {"query": torch.randn(2, 5, 64)}, "num_heads.*num_kv_heads=2, got 5"),
    (DECODE, {"key_cache": torch.randn(8, 16, 2, 32)}, r"^key_cache: expected .*\(8, 16, 2, 32\)"),
    (DECODE, {"value_cache": torch.randn(8, 16, 2, 64, dtype=F16)}, "^value_cache: expected .*float16"),
    (DECODE, {name: torch.randn(8, 12, 2, 64) for name in ("key_cache", "value_cache")}, "block_size.*got 12"),
    (DECODE, {name: torch.randn(8, 16, 2, 320) for name in ("key_cache", "value_cache")}, "key_cache"),
    (DECODE, {"block_tables": torch.zeros(2, 3, dtype=torch.int64)}, "^block_tables: expected .*int64"),
    (DECODE, {"seq_lens": torch.zeros(3, dtype=I32)}, r"^seq_lens: expected .*\(3,\)"),
    (DECODE, {"scale": math.nan}, "scale"),
    (DECODE, {"window": 0}, "window: expected at least 1 token, got 0"),
    (DECODE, {"soft_cap": 0.0}, "soft_cap: expected a finite number > 0"),
    (DECODE, {"soft_cap": math.inf}, "soft_cap: expected a finite number > 0"),
    (DECODE, {"sinks": torch.zeros(3)}, r"sinks: expected shape \(4\)"),
    (DECODE, {"sinks": torch.zeros(4, dtype=F16)}, "sinks: expected dtype"),
    (DECODE, {"slopes": torch.zeros(3)}, r"slopes: expected shape \(4\)"),
    (DECODE, {**float8_pages(), "key_scales": None, "value_scales": None}, "key_cache: .*float32, got torch.float8"),
    (DECODE, {**float8_pages(), "value_scales": None}, "value_scales: expected a torch.Tensor"),
    (DECODE, {**float8_pages(), "key_scales": torch.ones(3, 4)}, r"key_scales: expected shape \(3, 2\)"),
    (DECODE, {**float8_pages(), "value_scales": torch.ones(2, 3).t()}, "value_scales: expected a contiguous tensor"),
    (DECODE, {**float8_pages(), "key_cache": torch.zeros(3, 64, 2, 64)}, "key_cache: .*e4m3fn, got torch.float32"),
    (PREFILL, {"query": torch.randn(25, 4, 64, dtype=torch.float64)}, "^query: expected .*float64"),
    (PREFILL, {"key_cache": torch.randn(8, 16, 64)}, r"^key_cache: expected .*\(8, 16, 64\)"),
    (PREFILL, {"value_cache": torch.randn(9, 16, 2, 64)}, r"^value_cache: expected .*\(9, 16, 2, 64\)"),
    (PREFILL, {"block_tables": torch.zeros(3, 3, dtype=I32)}, r"^block_tables: expected .*\(3, 3\)"),
    (PREFILL, {"cu_query_lens": torch.zeros(2, dtype=I32)}, r"^cu_query_lens: expected .*\(2,\)"),
    (PREFILL, {"seq_lens": torch.zeros(2)}, "^seq_lens: expected .*float32"),
    (PREFILL, {"out": torch.empty(25, 4, 32)}, r"^out: expected shape \(25, 4, 64\)"),
    ("rope_and_cache", {"key": torch.randn(3, 3, 8)}, r"^key: expected .*\(3, 3, 8\)"),
    ("rope_and_cache", {"value": torch.randn(3, 2, 8).half()}, "^value: expected .*float16"),
    ("rope_and_cache", {"cos_sin": torch.randn(50, 10)}, "^cos_sin: expected .*10"),
    ("rope_and_cache", {"positions": torch.zeros(3)}, "^positions: expected .*float32"),
    ("rope_and_cache", {"key_cache": torch.zeros(2, 16, 2, 4)}, r"^key_cache: expected .*\(2, 16, 2, 4\)"),
    ("rope_and_cache", {"value_cache": torch.zeros(2, 8, 2, 8)}, r"^value_cache: expected .*\(2, 8, 2, 8\)"),
    ("rope_and_cache", {"slot_mapping": torch.zeros(4, dtype=torch.int64)}, r"^slot_mapping: expected .*\(4,\)"),
    ("rms_norm", {"x": torch.ones(5, 8, dtype=I32)}, "^x: expected dtype .*int32"),
    ("rms_norm", {"x": torch.ones(8, 8).T}, "^x: expected stride 1"),
    ("rms_norm", {"weight": torch.ones(9)}, r"^weight: expected shape \(8\) .*\(9,\)"),
    ("rms_norm", {"weight": torch.ones(8).half()}, "^weight: expected dtype .*float16"),
    ("rms_norm", {"residual": torch.ones(4, 8)}, r"^residual: expected shape \(5, 8\)"),
    ("rms_norm", {"eps": 0.0}, "^eps: expected .*0.0"),
    ("rms_norm", {"out": torch.ones(5, 16)[:, :8]}, "^out: expected a contiguous"),
    ("silu_and_mul", {"gate_up": torch.ones(5, 8, dtype=torch.float64)}, "^gate_up: expected dtype .*float64"),
    ("silu_and_mul", {"gate_up": torch.ones(5, 7)}, r"^gate_up: expected shape .*\(5, 7\)"),
    ("silu_and_mul", {"gate_up": torch.ones(8, 8).T}, "^gate_up: expected stride 1"),
    ("silu_and_mul", {"out": torch.ones(5, 8)}, r"^out: expected shape \(5, 4\)"),
    ("silu_and_mul", {"out": torch.ones(5, 4).half()}, "^out: expected dtype"),
    ("filter_and_draw", {"logits": torch.ones(5, 8).half()}, "^logits: expected dtype .*float16"),
    ("filter_and_draw", {"logits": torch.ones(5)}, r"^logits: expected shape .*\(5,\)"),
    ("filter_and_draw", {"logits": torch.ones(5, 0)}, "^logits: expected at least one token"),
    ("filter_and_draw", {"logits": torch.ones(8, 5).T}, "^logits: expected stride 1"),
    ("filter_and_draw", {"temperatures": torch.ones(4)}, r"^temperatures: expected shape \(5\)"),
    ("filter_and_draw", {"seeds": torch.ones(5)}, "^seeds: expected dtype .*float32"),
    ("filter_and_draw", {"top_k": torch.ones(5, dtype=I32)}, "^top_k: expected dtype .*int32"),
    ("filter_and_draw", {"top_p": torch.ones(5, 2)[:, 0]}, "^top_p: expected stride 1"),
    ("fixed_order_matmul", {"x": torch.ones(5, 8, dtype=torch.float64)}, "^x: expected dtype .*float64"),
    ("fixed_order_matmul", {"x": torch.ones(2, 5, 8)}, r"^x: expected shape .*\(2, 5, 8\)"),
    ("fixed_order_matmul", {"x": torch.ones(8, 5).T}, "^x: expected stride 1"),
    ("fixed_order_matmul", {"weight": torch.ones(4, 8).half()}, "^weight: expected dtype"),
    ("fixed_order_matmul", {"weight": torch.ones(4, 9)}, r"^weight: expected shape .*\(4, 9\)"),
    ("fixed_order_matmul", {"weight": torch.ones(8, 4).T}, "^weight: expected a contiguous tensor"),
    ("fixed_order_matmul", {"bias": torch.ones(5)}, r"^bias: expected shape .*\(5,\)"),
    ("plan_decode", {"num_kv_heads": 0}, "num_kv_heads"),
    ("plan_decode", {"split_tokens": 0, "max_seq_len": 5}, "split_tokens"),
    ("plan_decode", {"split_tokens": 100, "max_seq_len": 5}, "a multiple of 64"),
    ("plan_decode", {"split_tokens": 64}, "max_seq_len"),
    ("plan_decode", {"max_query_len": 17}, "max_query_len"),
    ("plan_decode", {"cu_query_lens": torch.zeros(3, dtype=I32)}, r"cu_query_lens: expected shape \(2\)"),
    ("copy_blocks", {"source": torch.zeros(3, 3, 8)}, r"source: expected shape \(2, \*, 8\)"),
    ("copy_blocks", {"source": torch.zeros(2, 3, 8).half()}, "source: expected dtype torch.float32"),
    ("copy_blocks", {"target": torch.zeros(2, 8, 3).transpose(1, 2)}, "target: expected stride 1 in the last"),
    ("copy_blocks", {"pairs": torch.tensor([1, 0])}, r"pairs: expected shape \(\*, 2\)"),
]


@pytest.mark.parametrize(("name", "changes", "text"), WRONG, ids=[f"{name}-{next(iter(c))}" for name, c, _ in WRONG])
def test_a_wrong_argument_is_named_by_kernel_and_reference(name: str, changes: dict[str, Any], text: str) -> None:
    for function in (getattr(kernels, name), getattr(kernels, f"{name}_reference")):
        with pytest.raises(kernels.KernelArgumentError, match=text):
            function(**{**ARGUMENTS[name](), **changes})


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name != "copy_blocks"])
def test_a_compiled_kernel_refuses_host_tensors(name: str) -> None:
    with pytest.raises(kernels.KernelUnavailableError, match=f"{name}_reference|TRITON_INTERPRET"):
        getattr(kernels, name)(**ARGUMENTS[name]())


def test_a_cache_of_float8_has_large_blocks() -> None:
    cache = torch.zeros(3, 16, 2, 64).to(torch.float8_e4m3fn)
    with pytest.raises(kernels.KernelArgumentError, match=r"block_size: expected one of \(64, 128, 256\).*got 16"):
        kernels.paged_decode_attention(**{**float8_pages(), "key_cache": cache, "value_cache": cache})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"values": torch.ones(4, 64, dtype=torch.uint8)}, "^values: expected dtype"),
        ({"scales": torch.ones(3, 4)}, r"^scales: expected shape .*\(2, 4\)"),
        ({"group_size": 24}, "^group_size: given 24, expected a multiple of 32"),
    ],
)
def test_wrong_int8_weights_are_named(changes: dict[str, Any], text: str) -> None:
    weight = {"values": torch.ones(4, 64, dtype=torch.int8), "scales": torch.ones(2, 4), "group_size": 32}
    with pytest.raises(kernels.KernelArgumentError, match=text):
        kernels.int8_matmul_reference(torch.ones(2, 64), **{**weight, **changes})


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (torch.ones(2, 5), torch.ones(2, 3), r"^a: expected shape"),
        (torch.ones(2, 4), torch.ones(1, 3), r"^b: expected shape \(2, 3\)"),
        (torch.ones(2, 4).half(), torch.ones(2, 3), "^a: expected dtype"),
        (torch.ones(4, 2).T, torch.ones(2, 3), "^a: expected a contiguous"),
        (torch.ones(9)[1:].view(2, 4), torch.ones(2, 3), "^a: .* multiple of 16 bytes"),
    ],
)
def test_wrong_matrices_of_an_adapter_are_named(a: Tensor, b: Tensor, text: str) -> None:
    table = kernels.LoraTable([(0, 3)], 4, 1, F32, CPU)
    with pytest.raises(kernels.KernelArgumentError, match=text):
        table.put(0, [kernels.LoraMatrices(a, b, 1.0)])


def test_rows_of_another_dtype_than_an_adapters_are_named() -> None:
    table = kernels.LoraTable([(0, 3)], 4, 1, torch.bfloat16, CPU)
    tiles = kernels.cut_tiles(torch.tensor([0]), [0, 1], [0], 1)
    with pytest.raises(kernels.KernelArgumentError, match=r"^table: expected matrices of torch\.float32"):
        kernels.add_lora_reference(torch.ones(1, 3), torch.ones(1, 4), table, tiles)


# -- definitions --------------------------------------------------------------------------------------------------


def contiguous(given: dict[str, Any], index: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence, a head for each query head."""
    blocks, length = ([3, 1], [0, 7, 2])[index], int(given["seq_lens"][index])
    keys, values = (
        given[name][blocks].reshape(-1, 2, 64)[:length].transpose(0, 1).repeat_interleave(2, dim=0)
        for name in ("key_cache", "value_cache")
    )
    return keys, values


def test_attention_of_both_kinds_is_that_over_contiguous_tokens() -> None:
    decode, prefill = pages(), chunks()
    decoded = kernels.paged_decode_attention_reference(**decode)
    prefilled = kernels.paged_prefill_attention_reference(**prefill)
    attend = torch.nn.functional.scaled_dot_product_attention
    for index, (start, end) in enumerate(((0, 20), (20, 25))):
        keys, values = contiguous(decode, index)
        expected = attend(decode["query"][index][:, None], keys, values, scale=0.125)
        torch.testing.assert_close(decoded[index], expected[:, 0], rtol=1e-5, atol=1e-5)
        keys, values = contiguous(prefill, index)
        visible = torch.ones(end - start, keys.shape[1], dtype=torch.bool).tril(keys.shape[1] - (end - start))
        query = prefill["query"][start:end].transpose(0, 1)
        expected = attend(query, keys, values, attn_mask=visible, scale=0.125)
        torch.testing.assert_close(prefilled[start:end], expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_an_empty_sequence_gets_zeros() -> None:
    actual = kernels.paged_decode_attention_reference(**{**pages(), "seq_lens": torch.tensor([0, 48], dtype=I32)})
    assert torch.equal(actual[0], torch.zeros(4, 64))
    assert actual[1].abs().sum() > 0


def test_decode_of_several_rows_is_that_of_each() -> None:
    given, starts = {**pages(), "query": torch.randn(5, 4, 64)}, torch.tensor([0, 2, 5], dtype=I32)
    lse = torch.empty(5, 4)
    rows = kernels.paged_decode_attention_reference(**given, cu_query_lens=starts, max_query_len=3, lse=lse)
    for row, (seq, length) in enumerate([(0, 19), (0, 20), (1, 46), (1, 47), (1, 48)]):
        alone = {**given, "query": given["query"][row : row + 1], "block_tables": given["block_tables"][seq : seq + 1]}
        alone["seq_lens"] = torch.tensor([length], dtype=I32)
        own_lse = torch.empty(1, 4)
        out = kernels.paged_decode_attention_reference(**alone, lse=own_lse)
        torch.testing.assert_close(out[0], rows[row], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own_lse[0], lse[row])


@pytest.mark.parametrize(
    ("name", "out"), [(DECODE, (2, 4, 64)), (PREFILL, (25, 4, 64)), ("rms_norm", (5, 8)), ("silu_and_mul", (5, 4))]
)
def test_a_reference_writes_to_out(name: str, out: tuple[int, ...]) -> None:
    reference, given, made = getattr(kernels, f"{name}_reference"), ARGUMENTS[name](), torch.empty(out)
    assert reference(**given, out=made) is made
    assert torch.equal(made, reference(**given))


def test_pairs_turn_as_complex_numbers_and_each_slot_is_written_alone() -> None:
    given = turns()
    before = given["query"].clone()
    kernels.rope_and_cache_reference(**given)
    angles = given["positions"][:, None] * 0.1 ** torch.arange(4)
    turned = torch.complex(before[..., :4], before[..., 4:]) * torch.polar(torch.ones(3, 4), angles)[:, None]
    torch.testing.assert_close(given["query"], torch.cat((turned.real, turned.imag), dim=-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(given["value_cache"][1, 1], given["value"][0])
    assert torch.equal(given["value_cache"][0, 0], given["value"][2])
    assert int((given["value_cache"] != 0).any(-1).sum()) == 4
    assert int((given["key_cache"] != 0).any(-1).sum()) == 4
    torch.testing.assert_close(given["key_cache"][1, 1], given["key"][0])  # position 0 does not turn


def test_norms_gates_and_products_are_torchs() -> None:
    x, weight, residual = torch.randn(5, 123), torch.randn(123), torch.randn(5, 123)
    norm = torch.nn.functional.rms_norm
    torch.testing.assert_close(kernels.rms_norm_reference(x, weight, eps=1e-5), norm(x, (123,), weight, eps=1e-5))
    normed, summed = kernels.rms_norm_reference(x, weight, eps=1e-5, residual=residual)
    assert torch.equal(summed, x + residual)
    torch.testing.assert_close(normed, norm(x + residual, (123,), weight, eps=1e-5))
    gate_up = torch.randn(5, 2 * 123)
    gate, up = gate_up.chunk(2, dim=1)
    torch.testing.assert_close(kernels.silu_and_mul_reference(gate_up), gate * torch.sigmoid(gate) * up)
    x, weight, bias = torch.randn(5, 64), torch.randn(7, 64), torch.randn(7)
    expected = torch.nn.functional.linear(x, weight, bias)
    torch.testing.assert_close(kernels.fixed_order_matmul_reference(x, weight, bias), expected)
    values, scales = torch.randint(-128, 128, (7, 64), dtype=torch.int8), torch.rand(2, 7)
    weight = torch.cat([values[:, :32] * scales[0][:, None], values[:, 32:] * scales[1][:, None]], dim=1)
    torch.testing.assert_close(kernels.int8_matmul_reference(x, values, scales, 32, bias), x @ weight.T + bias)


def test_an_adapter_adds_its_product() -> None:
    table = kernels.LoraTable([(0, 3), (3, 2)], 4, 1, F32, CPU)
    a, b = torch.randn(2, 4), torch.randn(2, 2)
    table.put(0, [None, kernels.LoraMatrices(a, b, 0.5)])
    x, y = torch.randn(3, 4), torch.randn(3, 5)
    expected = y.clone()
    expected[1:, 3:] += x[1:] @ a.T @ b * 0.5
    given = kernels.add_lora_reference(y, x, table, kernels.cut_tiles(torch.tensor([1, 2]), [0, 2], [0], 2))
    torch.testing.assert_close(given, expected)


def test_draws_follow_the_softmax_by_chi_square() -> None:
    logits, count = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -3.0, 0.2]), 20_000
    seeds, top_k = torch.arange(count), torch.full((count,), 4)
    rows = logits.repeat(count, 1)
    token_ids, _ = kernels.filter_and_draw_reference(rows, torch.ones(count), seeds, seeds % 50, top_k=top_k)
    counts, kept = torch.bincount(token_ids, minlength=8).double(), torch.tensor([1, 2, 4, 5])
    assert counts.sum() == counts[kept].sum()
    expected = torch.softmax(logits[kept].double(), 0) * count
    assert ((counts[kept] - expected) ** 2 / expected).sum().item() < 16.3  # 3 degrees of freedom, p = 0.001


def planned(lengths: list[int], **options: Any) -> kernels.DecodePlan:
    return kernels.plan_decode_reference(torch.tensor(lengths, dtype=I32), **{"num_kv_heads": 2, **options})


def test_grid_and_scratch_of_a_plan_do_not_depend_on_the_batch() -> None:
    sizes = {
        (plan.num_programs, plan.num_slots)
        for plan in (planned([length] * batch) for batch in (1, 32, 256) for length in (1024, 131072))
    }
    ((num_programs, num_slots),) = sizes
    assert num_slots == 2 * num_programs


@pytest.mark.parametrize(
    ("lengths", "options", "units"),
    [
        ([5, 0, 130, 999], {"max_seq_len": 999, "window": 60}, [1, 1, 2, 2]),
        ([5, 0, 130, 999], {"max_seq_len": 999, "window": 60, "split_tokens": 128}, [1, 1, 2, 1]),
        (
            [192, 192],
            {"window": 60, "cu_query_lens": torch.tensor([0, 1, 17], dtype=I32), "max_query_len": 16},
            [1, 2],  # a window begins with the first row
        ),
    ],
)
def test_units_before_a_window_are_no_work(lengths: list[int], options: dict[str, Any], units: list[int]) -> None:
    assert planned(lengths, **options).unit_starts.diff().tolist() == units
