"""Cases of the linear with a fixed order of additions: against its reference, and row by row."""

from __future__ import annotations

import pagestream_kernels as kernels
import torch
from pagestream_engine.layers.quantised.methods import TritonQuantisedMethod
from pagestream_engine.layers.quantised.select import choose_quantised_method
from pagestream_engine.layers.quantised.weight import QuantisedWeight, Storage
from support.pairwise import Case
from torch import Tensor

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCES = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2.4e-2}
_ROWS, _INPUTS = 150, 384
_COUNTS = (2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def check_fixed_order_matmul(case: Case, device: torch.device) -> None:
    """The result of the reference, in rows of a wider tensor too."""
    rows, outputs, inputs = case["shape"]
    dtype, extra = DTYPES[case["dtype"]], 48 if case["strided"] else 0
    x = torch.randn(rows, inputs + extra).to(dtype).to(device)[:, extra:]
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype).to(device)
    bias = torch.randn(outputs).to(dtype).to(device) if case["bias"] else None
    expected = kernels.fixed_order_matmul_reference(x, weight, bias)
    tolerance = TOLERANCES[case["dtype"]]
    torch.testing.assert_close(kernels.fixed_order_matmul(x, weight, bias), expected, rtol=tolerance, atol=tolerance)


def check_fixed_order_matmul_invariance(case: Case, device: torch.device) -> None:
    """A row has the same bits alone and among any number of others, at any place."""
    x, weight = cancelling(DTYPES[case["dtype"]], device)
    whole = kernels.fixed_order_matmul(x, weight)
    for index in range(0, _ROWS, case["step"]):
        alone = kernels.fixed_order_matmul(x[index].clone()[None], weight)
        assert torch.equal(alone[0], whole[index]), f"row {index}"
    for count in _COUNTS:
        first = (_ROWS - count) // 2
        part = kernels.fixed_order_matmul(x[first : first + count], weight)
        assert torch.equal(part, whole[first : first + count]), f"{count} rows from {first}"


def check_int8_matmul(case: Case, device: torch.device) -> None:
    """The result of the reference, and of each row alone the same bits."""
    rows, outputs, inputs = case["shape"]
    dtype, group_size = DTYPES[case["dtype"]], case["group"] or inputs
    x = torch.randn(rows, inputs).to(dtype).to(device)
    values = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8).to(device)
    scales = (torch.rand(-(-inputs // group_size), outputs) / inputs**0.5 / 64).to(device)
    bias = torch.randn(outputs).to(dtype).to(device) if case["bias"] else None
    got = kernels.int8_matmul(x, values, scales, group_size, bias)
    tolerance = TOLERANCES[case["dtype"]]
    expected = kernels.int8_matmul_reference(x, values, scales, group_size, bias)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for row in range(0, rows, 23):
        assert torch.equal(kernels.int8_matmul(x[row][None], values, scales, group_size, bias)[0], got[row])


def check_quantised_method(case: Case, device: torch.device) -> None:
    """The engine's method of int4 with zeros and an order of inputs by this kernel."""
    weight = QuantisedWeight(
        Storage.INT4,
        torch.randint(0, 16, (24, 96), dtype=torch.uint8, device=device),
        torch.rand(3, 24, device=device) / 50,
        group_size=32,
        zeros=torch.randint(0, 17, (3, 24), dtype=torch.uint8, device=device),
        order=torch.randperm(96, device=device),
    )
    dtype = DTYPES[case["dtype"]]
    method = choose_quantised_method(weight, dtype, exact=False, by_triton=True)
    assert isinstance(method, TritonQuantisedMethod)
    x, bias = torch.randn(5, 96).to(dtype).to(device), torch.randn(24).to(dtype).to(device)
    expected = (x.float() @ weight.dequantised(torch.float32).T + bias.float()).to(dtype)
    tolerance = TOLERANCES[case["dtype"]]
    torch.testing.assert_close(method.product(x, bias), expected, rtol=tolerance, atol=tolerance)


def cancelling(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (150, 384) rows and a weight of (32, 384) whose sums are near 0: what is left of them is decided by the
    order of additions."""
    half = _INPUTS // 2
    positive = torch.randn(_ROWS, half) * 2.0 ** torch.randint(-6, 7, (_ROWS, half))
    own, order = torch.randn(32, half), torch.randperm(half)
    x = torch.cat((positive, -positive[:, order]), dim=1).to(dtype)
    weight = torch.cat((own, own[:, order]), dim=1).to(dtype)
    pieces = [part.float() @ own.float().T for part, own in zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)]
    forwards = ((pieces[0] + pieces[1]) + pieces[2]) + pieces[3]
    in_pairs = (pieces[0] + pieces[2]) + (pieces[1] + pieces[3])
    differing = (forwards.to(dtype) != in_pairs.to(dtype)).float().mean()
    assert differing > 0.5, f"another order of additions changes {differing:.0%} of the sums"
    return x.to(device), weight.to(device)
