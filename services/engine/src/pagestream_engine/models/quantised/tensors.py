"""From a checkpoint's tensors to the `QuantisedWeight` of a projection, and of a linear with several of them.

Packing orders are those that the formats' own tools write: `compressed_tensors` (`pack_to_int32`), AutoAWQ
(`WQLinear_GEMM`: the nibbles of a word are columns 0, 2, 4, 6, 1, 3, 5, 7), AutoGPTQ (`QuantLinear`: the nibbles of a
word are 8 inputs; zeros less 1), AutoFP8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol

import torch
from torch import Tensor

from pagestream_engine.errors import DOWNLOAD_AGAIN, ConfigError, UnsupportedModel, WeightsError
from pagestream_engine.layers.quantised import QuantisedWeight, Storage, stack
from pagestream_engine.models.quantised.scheme import Scheme
from pagestream_engine.models.weights import LinearWeight, Part

_NIBBLES = 8
"""Of a word."""
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Of columns 0 to 7 among a word's nibbles."""
_MIDDLE = 8
"""What compressed-tensors adds to 4 bits with a sign."""
_MIDDLE_OF_8_BITS = 128
_FLOAT8_NAN = 0x7F
_BYTE = 8
"""Bits."""
_IGNORED = (
    "activation_scale",
    "input_global_scale",
    "input_scale",
    "k_scale",
    "output_scale",
    "v_scale",
    "weight_format",
    "weight_shape",
)
"""Tensors of a projection that its weight does not need."""


class TensorSource(Protocol):
    """A checkpoint's tensors by name."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        ...

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Return a tensor's dtype as stored; None where there is no such tensor."""
        ...

    def raw(self, name: str) -> Tensor:
        """Read a tensor as it is stored, on the CPU; WeightsError where there is none."""
        ...


def is_quantised(source: TensorSource, name: str) -> bool:
    """Return whether a projection has quantised weights."""
    if source.has(f"{name}.qweight") or source.has(f"{name}.weight_packed"):
        return True
    return source.dtype_of(f"{name}.weight") in (torch.int8, torch.uint8, torch.float8_e4m3fn)


def read_projection(source: TensorSource, scheme: Scheme, name: str, shape: tuple[int, int]) -> QuantisedWeight:
    """Read a projection.

    Args:
        name: of the projection, without a suffix.
        shape: (out features, in features).

    Raises:
        WeightsError: a tensor is missing, or has another shape than `shape` and the scheme ask for.
        UnsupportedModel: it is in a form that has no reader.
    """
    readers: dict[str, Callable[[_Projection], QuantisedWeight]] = {
        "awq": _awq,
        "gptq": _gptq,
        "bitsandbytes": _bitsandbytes if scheme.bits < _BYTE else _bitsandbytes_int8,
        "compressed-tensors": _compressed_tensors,
        "fbgemm_fp8": _whole,
        "fp8": _whole,
        "modelopt": _whole if scheme.bits == _BYTE else _nvfp4,
    }
    projection = _Projection(source, scheme, name, shape)
    weight = readers[scheme.method](projection)
    for ignored in _IGNORED:
        if source.has(f"{name}.{ignored}"):
            source.raw(f"{name}.{ignored}")
    return weight


class _Projection:
    """The tensors of one projection, whose shapes are checked."""

    def __init__(self, source: TensorSource, scheme: Scheme, name: str, shape: tuple[int, int]) -> None:
        self._source = source
        self.name = name
        self.scheme = scheme
        self.outputs, self.inputs = shape
        self.group_size = scheme.group_size or self.inputs
        if scheme.block_rows is not None or scheme.method == "bitsandbytes":  # the last block may be narrower
            self.group_size = gcd(self.group_size, self.inputs)
        if self.inputs % self.group_size or (self.group_size % 2 and self.group_size < self.inputs):
            raise UnsupportedModel(
                f"{name}: given groups of {self.group_size}, expected an even divisor of {self.inputs}"
            )
        self.groups = self.inputs // self.group_size

    def has(self, suffix: str) -> bool:
        return self._source.has(f"{self.name}.{suffix}")

    def read(self, suffix: str, *shape: int) -> Tensor:
        tensor = self._source.raw(f"{self.name}.{suffix}")
        if tuple(tensor.shape) != shape:
            raise WeightsError(
                f"{self.name}.{suffix}: given shape {tuple(tensor.shape)}, expected {shape} by config.json"
            )
        return tensor

    def block_scales(self, suffix: str) -> Tensor:
        """(groups, outputs), of a scale for each block of outputs and inputs."""
        rows, columns = self.scheme.block_rows or 1, self.scheme.group_size or self.inputs
        blocks = self.read(suffix, -(-self.outputs // rows), -(-self.inputs // columns)).float()
        of_outputs = torch.arange(self.outputs) // rows
        of_groups = torch.arange(self.groups) * self.group_size // columns
        return blocks[of_outputs][:, of_groups].T.contiguous()

    def any(self, suffix: str) -> Tensor:
        return self._source.raw(f"{self.name}.{suffix}")

    def refuse(self, suffix: str, given: object, expected: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.name}.{suffix}: given {given}, expected {expected}")

    def scales(self, suffix: str = "weight_scale") -> Tensor:
        """(groups, outputs), of a scale for the matrix, or (outputs, groups)."""
        tensor = self._source.raw(f"{self.name}.{suffix}").float()
        if tensor.numel() == 1 and self.scheme.group_size is None:
            return tensor.reshape(1, 1).expand(1, self.outputs).contiguous()
        if tuple(tensor.shape) not in {(self.outputs, self.groups), (self.outputs,) * (self.groups == 1)}:
            raise WeightsError(
                f"{self.name}.{suffix}: given shape {tuple(tensor.shape)}, expected {(self.outputs, self.groups)}"
            )
        return tensor.reshape(self.outputs, self.groups).T.contiguous()


def _awq(projection: _Projection) -> QuantisedWeight:
    outputs, inputs, groups = projection.outputs, projection.inputs, projection.groups
    values = nibbles(projection.read("qweight", inputs, outputs // _NIBBLES))[..., _AWQ_PLACES].flatten(1)
    zeros = nibbles(projection.read("qzeros", groups, outputs // _NIBBLES))[..., _AWQ_PLACES].flatten(1)
    scales = projection.read("scales", groups, outputs).float()
    return QuantisedWeight(Storage.INT4, values.T.contiguous(), scales, projection.group_size, zeros)


def _gptq(projection: _Projection) -> QuantisedWeight:
    outputs, inputs, groups = projection.outputs, projection.inputs, projection.groups
    bits = projection.scheme.bits
    words = projection.read("qweight", inputs * bits // 32, outputs)
    values = values_of(words, bits).permute(1, 0, 2).reshape(outputs, inputs)
    of_groups = values_of(projection.read("qzeros", groups, outputs * bits // 32), bits).flatten(1)
    if projection.scheme.zeros_less_one:
        of_groups = of_groups + 1
    zeros: Tensor | None = of_groups
    if bits == 8:
        if not bool((of_groups == _MIDDLE_OF_8_BITS).all()):
            raise projection.refuse("qzeros", "zeros of their own", f"{_MIDDLE_OF_8_BITS} in all (sym)")
        values, zeros = (values ^ _MIDDLE_OF_8_BITS).view(torch.int8), None
    scales = projection.read("scales", groups, outputs).float()
    order = None
    if projection.has("g_idx"):
        order = _order(projection, projection.read("g_idx", inputs).long(), "g_idx")
    if order is not None:
        values = values[:, order]
    storage = Storage.INT4 if bits == 4 else Storage.INT8
    return QuantisedWeight(storage, values.contiguous(), scales, projection.group_size, zeros, order)


def _compressed_tensors(projection: _Projection) -> QuantisedWeight:
    if projection.has("weight_global_scale"):
        return _nvfp4(projection)
    return _packed(projection) if projection.has("weight_packed") else _whole(projection)


def _nvfp4(projection: _Projection) -> QuantisedWeight:
    """Values of e2m1, the first in a byte's lower bits, and scales of e4m3 for 16 of them, times one of the matrix."""
    outputs, inputs, groups = projection.outputs, projection.inputs, projection.groups
    if projection.has("weight_global_scale"):  # compressed-tensors divides by it
        octets, factor = (
            projection.read("weight_packed", outputs, inputs // 2),
            1 / projection.any("weight_global_scale"),
        )
    else:
        octets, factor = projection.read("weight", outputs, inputs // 2), projection.any("weight_scale_2")
    values = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
    scales = projection.read("weight_scale", outputs, groups).view(torch.uint8).T.contiguous()
    factors = factor.float().reshape(1).expand(outputs).contiguous()
    return QuantisedWeight(Storage.NVFP4, values, scales, projection.group_size, table=e2m1(), factors=factors)


def _bitsandbytes(projection: _Projection) -> QuantisedWeight:
    """Values of `quant_map`, the first in a byte's upper bits, whose blocks go on from row to row."""
    outputs, inputs = projection.outputs, projection.inputs
    state, names = quant_state(projection.has, projection.any)
    for name in names:
        projection.any(name)
    octets = projection.any("weight").flatten()
    if octets.numel() * 2 != outputs * inputs:
        raise WeightsError(f"{projection.name}.weight: given {octets.numel() * 2} values, expected {outputs * inputs}")
    values = torch.stack((octets >> 4, octets & 15), dim=-1).view(outputs, inputs)
    largest = projection.any("weight.absmax")
    if projection.has("weight.nested_absmax"):
        of_blocks = projection.any("weight.nested_absmax").repeat_interleave(int(state["nested_blocksize"]))
        numbers = projection.any("weight.nested_quant_map")[largest.int()]
        largest = numbers * of_blocks[: largest.numel()] + float(state["nested_offset"])
    block = int(state["blocksize"])
    size = gcd(block, inputs)
    if size % 2:
        raise projection.refuse("weight", f"blocks of {block} values", f"an even divisor of {inputs} among theirs")
    first = torch.arange(outputs) * inputs + torch.arange(0, inputs, size)[:, None]
    table = projection.any("weight.quant_map").float()
    return QuantisedWeight(Storage.TABLE4, values, largest.float()[first // block], size, table=table)


def quant_state(has: Callable[[str], bool], read: Callable[[str], Tensor]) -> tuple[dict[str, Any], list[str]]:
    """Return what bitsandbytes has written about a weight of 4 bits, and the names of the tensors that say it.

    Args:
        has: whether a projection has a tensor, by its suffix.
        read: returns it.

    Raises:
        WeightsError: there is none, or it is malformed.
    """
    names = [f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    found = [name for name in names if has(name)]
    if not found:
        raise WeightsError(f"{names[0]}: missing, expected among the quantised weights; {DOWNLOAD_AGAIN}")
    try:
        state = json.loads(bytes(read(found[0]).tolist()))
    except ValueError as error:
        raise WeightsError(f"{found[0]}: given no JSON ({error}), expected an object") from error
    if not isinstance(state, dict) or not {"blocksize", "shape"} <= state.keys():
        raise WeightsError(f"{found[0]}: given {state!r:.80}, expected an object with blocksize and shape")
    return state, found


def _bitsandbytes_int8(projection: _Projection) -> QuantisedWeight:
    values = projection.read("weight", projection.outputs, projection.inputs)
    scales = projection.read("SCB", projection.outputs).float().view(1, -1) / _LARGEST_INT8
    return QuantisedWeight(Storage.INT8, values, scales, projection.inputs)


def _packed(projection: _Projection) -> QuantisedWeight:
    """compressed-tensors' pack-quantized."""
    outputs, inputs, bits = projection.outputs, projection.inputs, projection.scheme.bits
    words = projection.read("weight_packed", outputs, -(-inputs * bits // 32))
    order = None
    if projection.has("weight_g_idx"):
        order = _order(projection, projection.read("weight_g_idx", inputs).long(), "weight_g_idx")
    if bits == 4:
        values = nibbles(words).flatten(1)[:, :inputs]
        if projection.has("weight_zero_point"):
            packed = projection.read("weight_zero_point", -(-outputs // _NIBBLES), projection.groups)
            zeros = nibbles(packed.T.contiguous()).flatten(1)[:, :outputs].contiguous()
        else:
            zeros = torch.full((projection.groups, outputs), _MIDDLE, dtype=torch.uint8)
    else:
        values, zeros = (words.view(torch.uint8)[:, :inputs] ^ 0x80).view(torch.int8), None
    if order is not None:
        values = values[:, order]
    storage = Storage.INT4 if bits == 4 else Storage.INT8
    return QuantisedWeight(storage, values.contiguous(), projection.scales(), projection.group_size, zeros, order)


def _whole(projection: _Projection) -> QuantisedWeight:
    """A byte a weight: int-quantized and float-quantized of compressed-tensors, and fp8."""
    values = projection.read("weight", projection.outputs, projection.inputs)
    in_blocks = projection.scheme.block_rows is not None
    is_inverse = projection.has("weight_scale_inv") and (in_blocks or not projection.has("weight_scale"))
    name = "weight_scale_inv" if is_inverse else "weight_scale"
    for suffix in ("weight_scale_inv", "weight_zero_point"):
        if suffix != name and projection.has(suffix):
            raise projection.refuse(suffix, "scales of blocks, or zeros", "weight_scale of tensors, outputs or groups")
    storage = Storage.INT8 if values.dtype == torch.int8 else Storage.FLOAT8
    if storage == Storage.FLOAT8 and bool(((values.view(torch.uint8) & _FLOAT8_NAN) == _FLOAT8_NAN).any()):
        raise projection.refuse("weight", "NaN", "numbers")
    scales = projection.block_scales(name) if in_blocks else projection.scales(name)
    return QuantisedWeight(storage, values, scales, projection.group_size)


def _order(projection: _Projection, groups: Tensor, suffix: str) -> Tensor | None:
    """Return the order that makes groups of inputs contiguous; None where they are."""
    expected = torch.arange(projection.inputs) // projection.group_size
    if torch.equal(groups, expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise projection.refuse(suffix, "groups of unequal sizes", f"{projection.group_size} inputs in each")
    return order


def nibbles(words: Tensor) -> Tensor:
    """(rows, columns) int32 -> (rows, columns, 8) uint8, the lowest bits first."""
    octets = words.contiguous().view(torch.uint8)
    return torch.stack((octets & 15, octets >> 4), dim=-1).view(*words.shape, _NIBBLES)


def values_of(words: Tensor, bits: int) -> Tensor:
    """(rows, columns) int32 -> (rows, columns, 32 / bits) uint8, the lowest bits first."""
    return nibbles(words) if bits == 4 else words.contiguous().view(torch.uint8).view(*words.shape, 4)


@dataclass(frozen=True, slots=True)
class Dequantised:
    """A checkpoint in floats, for code that knows no other weights."""

    tensors: Mapping[str, Tensor]
    """All, by the names that a checkpoint in floats has."""
    linears: Mapping[str, QuantisedWeight]
    """As they are stored, by the names of their projections; of a tensor for all experts by its name and number."""


def dequantise(
    source: TensorSource, scheme: Scheme, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype
) -> Dequantised:
    """Read a quantised checkpoint.

    Args:
        shapes: of all its tensors, by name.
        dtype: of the floats.

    Raises:
        WeightsError: a tensor is missing or mis-shaped.
        UnsupportedModel: one is in a form that has no reader.
    """
    names = {name.removesuffix(suffix) for name in shapes for suffix in _STORED if name.endswith(suffix)}
    linears, tensors, read = {}, {}, set()
    for name in sorted(names):
        if not is_quantised(source, name):
            continue
        linears[name] = read_projection(source, scheme, name, _shape_of(source, scheme, name, shapes))
        tensors[f"{name}.weight"] = linears[name].dequantised(dtype)
        read |= {each for each in shapes if each.startswith(f"{name}.") and not each.endswith(".bias")}
    for name in shapes:
        stem = name.removesuffix(_BLOCKS)
        if stem != name:
            blocks, scales = source.raw(name), source.raw(stem + _BLOCK_SCALES)
            tensors[stem] = microscaled(blocks, scales, dtype).transpose(-1, -2).contiguous()
            codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)
            for index, (values, exponents) in enumerate(zip(codes, scales.transpose(-1, -2), strict=True)):
                kept = QuantisedWeight(Storage.MXFP4, values, exponents.contiguous(), _MXFP4_GROUP, table=e2m1())
                linears[f"{stem}.{index}"] = kept
            read |= {name, stem + _BLOCK_SCALES}
    for name in shapes:
        if name in read or name.endswith(_SCALES_OF_A_CACHE):
            continue
        tensor = source.raw(name)
        if not tensor.is_floating_point() or tensor.dtype == torch.float8_e4m3fn:
            raise UnsupportedModel(f"{name}: given {tensor.dtype} in a form that has no reader, expected floats")
        tensors[name] = tensor.to(dtype)
    return Dequantised(tensors, linears)


_STORED = (".qweight", ".weight_packed", ".weight")
_MXFP4_GROUP = 32
_BLOCKS, _BLOCK_SCALES = "_blocks", "_scales"
_SCALES_OF_A_CACHE = (".k_scale", ".v_scale")
_LARGEST_INT8 = 127
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of e2m1, by their 4 bits."""


def e2m1() -> Tensor:
    """(16,) float32: the values of e2m1 by their 4 bits."""
    return torch.tensor(_FP4, dtype=torch.float32)


def _shape_of(source: TensorSource, scheme: Scheme, name: str, shapes: Mapping[str, Sequence[int]]) -> tuple[int, int]:
    """Return (out features, in features) of a projection, by its largest tensor's."""
    if scheme.method == "bitsandbytes" and scheme.bits < _BYTE:
        state, _ = quant_state(
            lambda suffix: source.has(f"{name}.{suffix}"), lambda suffix: source.raw(f"{name}.{suffix}")
        )
        first, second = state["shape"]
        return int(first), int(second)
    if f"{name}.qweight" in shapes:
        first, second = shapes[f"{name}.qweight"]
        return (second * _NIBBLES, first) if scheme.method == "awq" else (second, first * 32 // scheme.bits)
    if f"{name}.weight_packed" in shapes:
        first, second = shapes[f"{name}.weight_packed"]
        of_word = 8 if source.dtype_of(f"{name}.weight_packed") == torch.uint8 else 32
        return first, second * of_word // scheme.bits
    if len(shapes[f"{name}.weight"]) != 2:
        raise UnsupportedModel(f"{name}.weight: given {len(shapes[f'{name}.weight'])} dimensions, expected two")
    first, second = shapes[f"{name}.weight"]
    return first, second * 2 if source.dtype_of(f"{name}.weight") == torch.uint8 else second


def microscaled(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise MXFP4 (OCP Microscaling Formats 1.0): values of 4 bits, 32 of which share a power of two.

    Args:
        blocks: (..., groups, 16) uint8, the lower 4 bits first.
        scales: (..., groups) uint8, the exponent plus 127.

    Returns:
        (..., groups * 32).
    """
    values = e2m1()
    pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), dim=-1).flatten(-2)
    return torch.ldexp(pairs, scales.int()[..., None] - 127).flatten(-2).to(dtype)


def read_quantised(
    source: TensorSource, scheme: Scheme, weight: LinearWeight, device: torch.device
) -> QuantisedWeight | None:
    """Read a linear from a quantised checkpoint; None where the checkpoint has it in floats.

    Raises:
        ConfigError: it can't be divided among so many ranks.
        WeightsError: a tensor is missing or mis-shaped.
        UnsupportedModel: its projections are stored in different ways.
    """
    names = [part.name for part in weight.parts]
    quantised = [is_quantised(source, name) for name in names]
    if not any(quantised):
        return None
    if not all(quantised):
        plain = names[quantised.index(False)]
        raise UnsupportedModel(
            f"{plain}: given floats beside quantised {names[quantised.index(True)]}, expected one form for projections "
            "of one input"
        )
    columns = weight.all_columns or weight.in_features
    shapes = {part.name: (part.all_rows or part.rows, columns) for part in weight.parts}
    whole = {name: read_projection(source, scheme, name, shape) for name, shape in shapes.items()}
    parts = [_part_of(whole[part.name], part, weight).to(device) for part in weight.parts]
    _check_alike(names, parts)
    return stack(parts)


def _part_of(projection: QuantisedWeight, part: Part, weight: LinearWeight) -> QuantisedWeight:
    """Return what a rank has of a projection."""
    found = projection.cut(slice(part.first_row, part.first_row + part.rows), weight.columns)
    if found is None:
        num_ranks = projection.shape[1] // weight.in_features
        hint = f"groups of {projection.group_size} inputs would be cut into odd numbers of them"
        if projection.order is not None:
            hint = "its inputs are in an order of their own (g_idx, of desc_act), which has no parts"
        raise ConfigError("tensor_parallel_size", num_ranks, f"1 for {part.name}", hint)
    return found


def _check_alike(names: Sequence[str], parts: Sequence[QuantisedWeight]) -> None:
    first = parts[0]
    for name, part in zip(names, parts, strict=True):
        if part.storage != first.storage or part.group_size != first.group_size or not _equal(part, first):
            raise UnsupportedModel(
                f"{name}: given another form, group size or order of inputs (g_idx) than {names[0]}, expected the same "
                "for projections of one input"
            )


def _equal(part: QuantisedWeight, other: QuantisedWeight) -> bool:
    pairs = ((part.order, other.order), (part.table, other.table))
    return all(one is two if one is None or two is None else torch.equal(one, two) for one, two in pairs)
