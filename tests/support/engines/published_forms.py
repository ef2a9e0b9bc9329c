"""Quantised tensors as published checkpoints have them, by their `quantization_config`.

Packing orders are those of `quantised_checkpoints`; also bitsandbytes' NF4 with nested scales (`QuantState.as_dict` of
`bitsandbytes/functional`), NVFP4 of Model Optimizer (two values a byte, the first lower; a scale in e4m3 for 16
inputs, and one in float32), and `weight_scale_inv` of a whole matrix (Ministral 3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from support.engines.quantised_checkpoints import words_of
from torch import Tensor

Tensors = dict[str, Tensor]
Settings = Mapping[str, Any]
Packer = Callable[[str, Tensor, Settings], tuple[Tensors, Tensor]]
"""Name and values of a tensor, `quantization_config` -> the stored tensors, and the values that they stand for."""
_LINEARS = re.compile(r"\.(\w+_proj(_with_mqa)?|w[123])\.weight$")
_EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj$")
_LARGEST_FLOAT8 = 448.0
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def packer_of(settings: Settings, name: str, tensor: Tensor) -> str | None:
    """Return the key in PACKERS of what packs a tensor; None where it stays in floats."""
    method = settings.get("quant_method") or "modelopt"
    if method == "mxfp4":
        return method if _EXPERTS.search(name) else None
    if tensor.dim() != 2 or "vis" in name or not _LINEARS.search(name):
        return None
    if method == "modelopt":
        return f"modelopt {settings['quant_algo']}"
    if method == "compressed-tensors":
        return str(settings["format"])
    return str(method)


def _words(values: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack (rows, columns) along the columns; `places`: which column of each word's stands where in it."""
    per_word = 32 // bits
    order = places or tuple(range(per_word))
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word))
    return words_of([padded[:, place::per_word] for place in order], bits)


def _rounded(weight: Tensor, bits: int, size: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return values, scales and zeros, (out, groups), and what they stand for."""
    parts, most = weight.view(weight.shape[0], -1, size), 2**bits - 1
    if symmetric:
        scales = (parts.abs().amax(dim=2) * 2 / most).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = parts.amin(dim=2).clamp(max=0), parts.amax(dim=2).clamp(min=0)
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(1, most)
    values = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    restored = (values - zeros[..., None]) * scales[..., None]
    return values.view_as(weight), scales, zeros, restored.view_as(weight)


def _awq(name: str, weight: Tensor, settings: Settings) -> tuple[Tensors, Tensor]:
    values, scales, zeros, restored = _rounded(weight, 4, settings["group_size"], symmetric=False)
    stem = name.removesuffix(".weight")
    return {
        f"{stem}.qweight": _words(values.T, 4, _AWQ_PLACES),
        f"{stem}.qzeros": _words(zeros.T, 4, _AWQ_PLACES),
        f"{stem}.scales": scales.T.half(),
    }, restored


def _gptq(name: str, weight: Tensor, settings: Settings) -> tuple[Tensors, Tensor]:
    bits, size, inputs = settings["bits"], settings["group_size"], weight.shape[1]
    # Projections of one input have one order of inputs.
    generator = torch.Generator().manual_seed(inputs)
    order = torch.randperm(inputs, generator=generator) if settings["desc_act"] else torch.arange(inputs)
    values, scales, zeros, of_order = _rounded(weight[:, order], bits, size, symmetric=settings["sym"])
    restored, stored, groups = (
        torch.empty_like(weight),
        torch.empty_like(weight),
        torch.empty(inputs, dtype=torch.int32),
    )
    restored[:, order], stored[:, order] = of_order, values
    groups[order] = (torch.arange(inputs) // size).int()
    stem = name.removesuffix(".weight")
    return {
        f"{stem}.qweight": _words(stored, bits).T,
        f"{stem}.qzeros": _words(zeros.T - 1, bits),
        f"{stem}.scales": scales.T.half(),
        f"{stem}.g_idx": groups,
    }, restored


def _packed(name: str, weight: Tensor, settings: Settings) -> tuple[Tensors, Tensor]:
    (group,) = settings["config_groups"].values()
    asked = group["weights"]
    size = asked["group_size"] or weight.shape[1]
    values, scales, zeros, _ = _rounded(weight, asked["num_bits"], size, symmetric=asked["symmetric"])
    stored = scales.bfloat16()
    stem = name.removesuffix(".weight")
    return {
        f"{stem}.weight_packed": _words(values, asked["num_bits"]),
        f"{stem}.weight_scale": stored,
        f"{stem}.weight_shape": torch.tensor(weight.shape),
    }, (values - zeros.repeat_interleave(size, 1)) * stored.float().repeat_interleave(size, 1)


def _int8(name: str, weight: Tensor, _: Settings) -> tuple[Tensors, Tensor]:
    scales = (weight.abs().amax(dim=1, keepdim=True) / 127).bfloat16().float()
    values = (weight / scales).round().clamp(-128, 127)
    return {name: values.to(torch.int8), f"{name}_scale": scales.bfloat16()}, values * scales


def _float8(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    values = (weight / scales).to(torch.float8_e4m3fn)
    return values, values.float() * scales


def _compressed_float8(name: str, weight: Tensor, settings: Settings) -> tuple[Tensors, Tensor]:
    (group,) = settings["config_groups"].values()
    if group["weights"]["strategy"] == "tensor":
        return _float8_of_matrix(name, weight, settings)
    scales = (weight.abs().amax(dim=1, keepdim=True) / _LARGEST_FLOAT8).bfloat16()
    values, restored = _float8(weight, scales.float())
    return {name: values, f"{name}_scale": scales}, restored


def _float8_of_matrix(name: str, weight: Tensor, settings: Settings) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax() / _LARGEST_FLOAT8
    values, restored = _float8(weight, scale)
    stem, own = name.removesuffix(".weight"), settings.get("quant_method") == "fp8"
    tensors = {name: values, f"{name}_scale_inv" if own else f"{name}_scale": scale}
    tensors[f"{stem}.activation_scale" if own else f"{stem}.input_scale"] = torch.tensor(0.02)
    if settings.get("kv_cache_quant_algo") and name.endswith(("k_proj.weight", "v_proj.weight")):
        tensors[f"{stem}.{stem[-6]}_scale"] = torch.tensor(0.5)
    return tensors, restored


def _fp8(name: str, weight: Tensor, settings: Settings) -> tuple[Tensors, Tensor]:
    if settings["weight_block_size"] is None:
        return _float8_of_matrix(name, weight, settings)
    rows, columns = settings["weight_block_size"]
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
    scales = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).abs().amax(dim=(1, 3)) / _LARGEST_FLOAT8
    of_weight = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:outputs, :inputs]
    values, restored = _float8(weight, of_weight)
    return {name: values, f"{name}_scale_inv": scales}, restored


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _codes(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Round to e2m1: codes of 4 bits, and the numbers."""
    magnitudes = torch.tensor(_FP4)
    found = (scaled.abs()[..., None] - magnitudes).abs().argmin(dim=-1)
    return found.byte() | (scaled < 0).byte() << 3, magnitudes[found] * scaled.sign()


def _nvfp4(name: str, weight: Tensor, settings: Settings) -> tuple[Tensors, Tensor]:
    groups = weight.unflatten(1, (-1, settings["group_size"]))
    whole = weight.abs().amax() / (6.0 * _LARGEST_FLOAT8)
    scales = (groups.abs().amax(dim=2) / 6.0 / whole).to(torch.float8_e4m3fn)
    both = (scales.float() * whole)[..., None]
    codes, numbers = _codes(groups / both.clamp(min=1e-12))
    flat, stem = codes.flatten(1), name.removesuffix(".weight")
    return {
        name: flat[:, 0::2] | flat[:, 1::2] << 4,
        f"{name}_scale": scales,
        f"{name}_scale_2": whole,
        f"{stem}.input_scale": torch.tensor(0.02),
    }, (numbers * both).flatten(1)


def _mxfp4(name: str, weight: Tensor, _: Settings) -> tuple[Tensors, Tensor]:
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = groups.abs().amax(dim=3, keepdim=True).log2().floor() - 2
    codes, numbers = _codes(groups / exponents.exp2())
    return {
        f"{name}_blocks": codes[..., 0::2] | codes[..., 1::2] << 4,
        f"{name}_scales": (exponents.squeeze(3) + 127).byte(),
    }, (numbers * exponents.exp2()).flatten(2).transpose(1, 2)


_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_BLOCK, _NESTED_BLOCK = 64, 256


def _nf4(name: str, weight: Tensor, settings: Settings) -> tuple[Tensors, Tensor]:
    table, nested_table = torch.tensor(_NF4), torch.linspace(-1, 1, 256)
    blocks = weight.reshape(-1, _BLOCK)
    absmax = blocks.abs().amax(dim=1)
    offset = absmax.mean()
    rest = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % _NESTED_BLOCK)).view(-1, _NESTED_BLOCK)
    nested = rest.abs().amax(dim=1)
    scaled = (rest / nested[:, None].clamp(min=1e-12)).flatten()[: len(absmax)]
    codes_of_max = torch.searchsorted((nested_table[1:] + nested_table[:-1]) / 2, scaled).byte()
    used = nested_table[codes_of_max.long()] * nested.repeat_interleave(_NESTED_BLOCK)[: len(absmax)] + offset
    codes = ((blocks / used[:, None])[..., None] - table).abs().argmin(dim=-1)
    flat = codes.flatten().byte()
    state = {
        "quant_type": settings["bnb_4bit_quant_type"],
        "blocksize": _BLOCK,
        "dtype": "bfloat16",
        "shape": list(weight.shape),
        "nested_blocksize": _NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": float(offset),
    }
    return {
        name: (flat[0::2] << 4 | flat[1::2])[:, None],
        f"{name}.absmax": codes_of_max,
        f"{name}.quant_map": table,
        f"{name}.nested_absmax": nested,
        f"{name}.nested_quant_map": nested_table,
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }, (table[codes] * used[:, None]).view_as(weight)


PACKERS: Mapping[str, Packer] = {
    "awq": _awq,
    "bitsandbytes": _nf4,
    "float-quantized": _compressed_float8,
    "fp8": _fp8,
    "gptq": _gptq,
    "int-quantized": _int8,
    "modelopt FP8": _float8_of_matrix,
    "modelopt NVFP4": _nvfp4,
    "mxfp4": _mxfp4,
    "pack-quantized": _packed,
}
"""By the method, or the format of it, that `quantization_config` names."""
