"""Quantised checkpoints in the formats of their tools, made of a model folder, and the floats that they stand for.

The packing is written here from the formats' descriptions, word by word, apart from the engine's own unpacking:

- compressed-tensors, pack-quantized: `compressed_tensors/compressors/pack_quantized` (values plus 2^(bits - 1), the
  first in the lowest bits of a word; zeros are packed along the outputs);
- int-quantized and float-quantized: `compressed_tensors/compressors/naive_quantized`;
- AWQ, version gemm: AutoAWQ, `awq/modules/linear/gemm.py` (nibbles of a word hold columns 0, 2, 4, 6, 1, 3, 5, 7);
- GPTQ: AutoGPTQ, `auto_gptq/nn_modules/qlinear` (nibbles of a word hold 8 inputs; zeros are stored less 1);
- fp8 with a scale for a matrix: AutoFP8; for blocks: `weight_scale_inv` of DeepSeek V3's `inference/fp8_cast_bf16.py`;
- NVFP4: `compressed_tensors/compressors/nvfp4` (divides by a scale of the matrix) and Model Optimizer's export
  (multiplies by one); bitsandbytes: `bitsandbytes/functional.py`, `quantize_4bit` and `QuantState.as_dict`;
- fbgemm_fp8: `transformers/integrations/fbgemm_fp8.py`; modelopt: the export of NVIDIA's Model Optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
Tensors = dict[str, Tensor]
Packer = Callable[[Tensor, torch.Generator], tuple[Tensors, Tensor]]
"""(out features, in features) -> the checkpoint's tensors by suffix, and the weight that they stand for in float32."""


def write(folder: Path, target: Path, form: str) -> tuple[Path, Path]:
    """Write the model of `folder` in a form, and a folder with the floats that it stands for; return both.

    Args:
        folder: with a `model.safetensors` in floats.
        target: below which the two are made.
        form: key of `FORMS`.
    """
    packer, configuration = FORMS[form]
    quantised: Tensors = {}
    plain: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj"):
            quantised[name] = plain[name] = tensor
            continue
        # Projections of one input have one order of inputs.
        generator = torch.Generator().manual_seed(tensor.shape[1])
        tensors, plain[name] = packer(tensor.float(), generator)
        quantised.update({f"{stem}.{suffix}": value.contiguous() for suffix, value in tensors.items()})
    config = json.loads((folder / "config.json").read_text())
    for place, tensors, changes in (
        (target / "quantised", quantised, {"quantization_config": configuration}),
        (target / "plain", plain, {}),
    ):
        place.mkdir(parents=True)
        save_file({name: value.contiguous() for name, value in tensors.items()}, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps({**config, **changes}))
        if (folder / "tokenizer.json").is_file():
            (place / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    return target / "quantised", target / "plain"


def write_mxfp4(folder: Path, target: Path) -> Path:
    """Write gpt-oss with its experts in MXFP4, as it is published (OCP Microscaling Formats 1.0)."""
    tensors: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        groups = tensor.float().transpose(1, 2).unflatten(2, (-1, 32))
        exponents = groups.abs().amax(dim=3, keepdim=True).log2().floor() - 2
        codes = _e2m1(groups / exponents.exp2())
        tensors[name + "_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[name + "_scales"] = (exponents.squeeze(3) + 127).byte()
    target.mkdir(parents=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (target / "config.json").write_text(json.dumps(config))
    return target


_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NF4 = (-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0)
_NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)


def _e2m1(scaled: Tensor) -> Tensor:
    """Round to the nearest value of e2m1: its 4 bits."""
    return (scaled.abs()[..., None] - _MAGNITUDES).abs().argmin(dim=-1).byte() | (scaled < 0).byte() << 3


def _nvfp4(*, divides: bool) -> Packer:
    def pack(weight: Tensor, _: torch.Generator) -> tuple[Tensors, Tensor]:
        groups = weight.unflatten(1, (-1, 16))
        stored = 6 * 448 / weight.abs().amax()
        factor = 1 / stored
        scales = (groups.abs().amax(dim=2) / 6 / factor).to(torch.float8_e4m3fn)
        of_groups = (scales.float() * factor)[..., None]
        codes = _e2m1(groups / of_groups)
        restored = _MAGNITUDES[(codes & 7).int()] * (1 - 2.0 * (codes >> 3)) * of_groups
        octets = (codes[..., 0::2] | codes[..., 1::2] << 4).flatten(1)
        if divides:
            own = {"weight_packed": octets, "weight_global_scale": stored.view(1)}
        else:
            own = {"weight": octets, "weight_scale_2": factor, "input_scale": torch.tensor(0.02)}
        return {**own, "weight_scale": scales}, restored.flatten(1)

    return pack


def _nf4(*, nested: bool) -> Packer:
    def pack(weight: Tensor, _: torch.Generator) -> tuple[Tensors, Tensor]:
        size, table = 64, torch.tensor(_NF4)
        blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % size)).view(-1, size)
        largest = blocks.abs().amax(dim=1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "dtype": "float32", "shape": [*weight.shape]}
        own: Tensors = {"weight.absmax": largest, "weight.quant_map": table}
        if nested:
            numbers, offset = torch.linspace(-1, 1, 256), float(largest.mean())
            most = (largest - offset).abs().amax()
            places = ((largest - offset)[:, None] / most - numbers).abs().argmin(dim=1).byte()
            largest = numbers[places.int()] * most + offset
            of_nested = most.repeat(-(-len(largest) // 256))
            state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
            own |= {"weight.absmax": places, "weight.nested_absmax": of_nested, "weight.nested_quant_map": numbers}
        codes = ((blocks / largest[:, None])[..., None] - table).abs().argmin(dim=-1).byte()
        restored = (table[codes.int()] * largest[:, None]).flatten()[: weight.numel()].view_as(weight)
        pairs = codes.flatten()[: weight.numel()].view(-1, 2)
        own["weight"] = (pairs[:, :1] << 4) | pairs[:, 1:]
        own["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        return own, restored

    return pack


def _int8_of_rows(weight: Tensor, _: torch.Generator) -> tuple[Tensors, Tensor]:
    largest = weight.abs().amax(dim=1)
    values = (weight * 127 / largest[:, None]).round().to(torch.int8)
    tensors = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values * (largest[:, None] / 127)


def words_of(columns: list[Tensor], bits: int) -> Tensor:
    """Put values of a few bits, the first lowest, into int32."""
    word = torch.zeros_like(columns[0], dtype=torch.int64)
    for place, column in enumerate(columns):
        word |= column.long() << (place * bits)
    return torch.where(word >= 2**31, word - 2**32, word).int()


def _along(values: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Pack (rows, columns) along the columns; `places`: which column of each word's stands where in it."""
    per_word = 32 // bits
    order = places or tuple(range(per_word))
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % per_word))
    return words_of([padded[:, place::per_word] for place in order], bits)


def _grouped(weight: Tensor, bits: int, *, symmetric: bool, group: int | None = GROUP) -> tuple[Tensor, Tensor, Tensor]:
    """Round by groups of inputs: values 0 to 2^bits - 1, (out, in), and scales and zeros, (out, groups)."""
    size = weight.shape[1] if group is None else group
    parts = weight.view(weight.shape[0], -1, size)
    most = 2**bits - 1
    if symmetric:
        scales = (parts.abs().amax(dim=2) * 2 / most).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = parts.amin(dim=2).clamp(max=0), parts.amax(dim=2).clamp(min=0)
        scales = ((high - low) / most).half().float()
        zeros = (-low / scales).round().clamp(1, most)
    values = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return values.view_as(weight), scales, zeros


def _restored(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """scale * (value - zero), (out, in)."""
    size = values.shape[1] // scales.shape[1]
    return (values - zeros.repeat_interleave(size, 1)) * scales.repeat_interleave(size, 1)


def _packed(bits: int, *, symmetric: bool, group: int | None) -> Packer:
    def pack(weight: Tensor, _: torch.Generator) -> tuple[Tensors, Tensor]:
        values, scales, zeros = _grouped(weight, bits, symmetric=symmetric, group=group)
        tensors = {
            "weight_packed": _along(values, bits),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = _along(zeros.T, bits).T
        return tensors, _restored(values, scales, zeros)

    return pack


def _whole_int8(weight: Tensor, _: torch.Generator) -> tuple[Tensors, Tensor]:
    scales = (weight.abs().amax(dim=1, keepdim=True) / 127).bfloat16().float()
    values = (weight / scales).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales.bfloat16()}, values * scales


def _float8(*, of_matrix: bool) -> Packer:
    def pack(weight: Tensor, _: torch.Generator) -> tuple[Tensors, Tensor]:
        scales = weight.abs().amax() / 448 if of_matrix else weight.abs().amax(dim=1, keepdim=True) / 448
        values = (weight / scales).to(torch.float8_e4m3fn)
        tensors = {"weight": values, "weight_scale": scales}
        if of_matrix:
            tensors["input_scale"] = torch.tensor(0.02)
        return tensors, values.float() * scales

    return pack


def _blocks(rows: int, columns: int, *, suffix: str) -> Packer:
    """Scales of blocks of outputs and inputs, the last of which may be smaller."""

    def pack(weight: Tensor, _: torch.Generator) -> tuple[Tensors, Tensor]:
        outputs, inputs = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -inputs % columns, 0, -outputs % rows))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        of_weight = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:outputs, :inputs]
        values = (weight / of_weight).to(torch.float8_e4m3fn)
        return {"weight": values, suffix: scales}, values.float() * of_weight

    return pack


def _with_cache_scales(packer: Packer) -> Packer:
    def pack(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        tensors, restored = packer(weight, generator)
        return {**tensors, "k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.5)}, restored

    return pack


def _awq(weight: Tensor, _: torch.Generator) -> tuple[Tensors, Tensor]:
    values, scales, zeros = _grouped(weight, 4, symmetric=False)
    places = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": _along(values.T, 4, places),
        "qzeros": _along(zeros.T, 4, places),
        "scales": scales.T.half(),
    }
    return tensors, _restored(values, scales, zeros)


def _gptq(*, symmetric: bool, in_order: bool, less_one: int = 1) -> Packer:
    def pack(weight: Tensor, generator: torch.Generator) -> tuple[Tensors, Tensor]:
        inputs = weight.shape[1]
        order = torch.arange(inputs) if in_order else torch.randperm(inputs, generator=generator)
        values, scales, zeros = _grouped(weight[:, order], 4, symmetric=symmetric)
        restored, stored = torch.empty_like(weight), torch.empty_like(weight)
        groups = torch.empty(inputs, dtype=torch.int32)
        restored[:, order], stored[:, order] = _restored(values, scales, zeros), values
        groups[order] = (torch.arange(inputs) // GROUP).int()
        tensors = {
            "qweight": _along(stored, 4).T,
            "qzeros": _along(zeros.T - less_one, 4),
            "scales": scales.T.half(),
            "g_idx": groups,
        }
        return tensors, restored

    return pack


def _compressed(form: str, activations: Mapping[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, **weights},
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
_GROUPS_OF_4 = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
_NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}

FORMS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "compressed-tensors int8, packed": (_packed(8, symmetric=True, group=None), _compressed("pack-quantized")),
    "compressed-tensors int8, W8A8": (_whole_int8, _compressed("int-quantized", _DYNAMIC)),
    "compressed-tensors int4": (
        _packed(4, symmetric=False, group=GROUP),
        _compressed("pack-quantized", **_GROUPS_OF_4 | {"symmetric": False}),
    ),
    "compressed-tensors fp8": (_float8(of_matrix=False), _compressed("float-quantized", type="float")),
    "fp8": (_float8(of_matrix=True), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8, blocks": (
        _blocks(24, 48, suffix="weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [24, 48]},
    ),
    "fp8, blocks wider than a matrix": (
        _blocks(128, 128, suffix="weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    ),
    "compressed-tensors fp8, blocks": (
        _blocks(16, 32, suffix="weight_scale"),
        _compressed("float-quantized", type="float", strategy="block", block_structure=[16, 32])
        | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
    ),
    "fbgemm_fp8": (_float8(of_matrix=False), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt": (
        _with_cache_scales(_float8(of_matrix=True)),
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    ),
    "modelopt nvfp4": (_nvfp4(divides=False), {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
    "compressed-tensors nvfp4": (
        _nvfp4(divides=True),
        _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "bitsandbytes nf4": (_nf4(nested=False), _NF4_CONFIG),
    "bitsandbytes nf4, nested": (_nf4(nested=True), _NF4_CONFIG | {"bnb_4bit_use_double_quant": True}),
    "bitsandbytes int8": (_int8_of_rows, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq, symmetric": (_gptq(symmetric=True, in_order=True), {**_GPTQ, "desc_act": False, "sym": True}),
    "gptq, desc_act": (_gptq(symmetric=False, in_order=False), {**_GPTQ, "desc_act": True, "sym": False}),
    "gptq_v2": (
        _gptq(symmetric=False, in_order=True, less_one=0),
        {**_GPTQ, "desc_act": False, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
}
"""Form -> what packs a weight, and `quantization_config`."""
