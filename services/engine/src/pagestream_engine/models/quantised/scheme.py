"""What `quantization_config` of config.json says, and the refusal of what has no reader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pagestream_engine.errors import ConfigError, ModelFileError, UnsupportedModel
from pagestream_engine.models.config import ConfigFile

_NVFP4 = "nvfp4-pack-quantized"
_FORMATS = {
    "pack-quantized": (4, 8),
    "int-quantized": (8,),
    "float-quantized": (8,),
    "naive-quantized": (8,),
    _NVFP4: (4,),
}
"""Of compressed-tensors -> bits of a weight."""
_NVFP4_GROUP = 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's quantised linears are stored. Tensors say the rest: which linears are plain, sizes."""

    method: str
    """Its name in config.json."""
    bits: int
    group_size: int | None = None
    """Inputs that share a scale; None: all of an output, or of the matrix."""
    block_rows: int | None = None
    """Outputs that share a scale with all inputs of a group; None: each has its own."""
    zeros_less_one: bool = False
    """Whether zeros are stored less 1 (GPTQ's first format)."""
    scale_bytes: int = 4
    """Of a group's scale as it is kept; a zero has one more."""
    has_zeros: bool = False
    """Whether groups have zeros as they are kept."""
    has_table: bool = False
    """Whether values are places in a table."""
    has_factors: bool = False
    """Whether scales of an output have a factor."""
    has_order: bool = False
    """Whether each weight has an order of its inputs."""

    @classmethod
    def read(cls, file: ConfigFile) -> Scheme | None:
        """Read a configuration; None where the checkpoint is not quantised.

        Raises:
            ModelFileError: the field is malformed.
            UnsupportedModel: it asks for a form of weights that has no reader.
        """
        given = file.get("quantization_config")
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ModelFileError(f"config.json: quantization_config: given {given!r:.80}, expected an object")
        method = str(given.get("quant_method"))
        if method not in _READERS:
            raise _refusal("quant_method", method, f"one of {', '.join(_READERS)}")
        return _READERS[method](given)

    def check_options(self, quantization: str | None, *, offloads: bool) -> None:
        """Raise ConfigError for options that do not go with a quantised checkpoint.

        Args:
            quantization: `ModelConfig.quantization`.
            offloads: whether `cpu_offload_gb` is above 0.
        """
        expected = f"for a checkpoint that is quantised by {self.method}"
        if quantization is not None:
            raise ConfigError("quantization", quantization, f"None {expected}")
        if offloads:
            hint = "host memory holds weights in the model's dtype"
            raise ConfigError("cpu_offload_gb", "more", f"0 {expected}", hint)


def _compressed_tensors(given: Mapping[str, Any]) -> Scheme:
    sparsity = given.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refusal("sparsity_config.format", sparsity["format"], "dense")
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelFileError(
            f"config.json: quantization_config.config_groups: given {groups!r:.80}, expected an object"
        )
    found = {_weights_of(name, group, given.get("format")) for name, group in groups.items()}
    if len(found) > 1:
        raise _refusal("config_groups", f"{len(found)} forms of weights", "one for all linears")
    return found.pop()


def _weights_of(name: str, group: Any, default_format: Any) -> Scheme:
    place = f"config_groups.{name}"
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise ModelFileError(f"config.json: quantization_config.{place}.weights: given {weights!r:.80}, expected some")
    form = group.get("format") or default_format
    if form not in _FORMATS:
        raise _refusal(f"{place}.format", form, f"one of {', '.join(_FORMATS)}")
    _expect(weights, "num_bits", _FORMATS[form], place)
    kind = "float" if form in ("float-quantized", _NVFP4) else "int"
    _expect(weights, "type", (kind, *(("float",) if form == "naive-quantized" else ())), place)
    _expect(
        weights, "strategy", ("tensor_group",) if form == _NVFP4 else ("tensor", "channel", "group", "block"), place
    )
    if weights["num_bits"] == 8:
        _expect(weights, "symmetric", (True, None), place)
    activations = group.get("input_activations")
    if activations is not None:
        _warn_of_activations(f"{activations.get('num_bits')}-bit {activations.get('type')}")
    if group.get("output_activations") is not None:
        raise _refusal(f"{place}.output_activations", "some", "null")
    if form == _NVFP4:
        _expect(weights, "group_size", (_NVFP4_GROUP,), place)
        return Scheme("compressed-tensors", 4, _NVFP4_GROUP, scale_bytes=1, has_table=True, has_factors=True)
    if weights["strategy"] == "block":
        _expect(weights, "num_bits", (8,), place)
        rows, columns = _block(f"{place}.weights.block_structure", weights.get("block_structure"))
        return Scheme("compressed-tensors", 8, columns, rows)
    size = weights.get("group_size")
    bits = int(weights["num_bits"])
    return Scheme("compressed-tensors", bits, size if weights["strategy"] == "group" else None, has_zeros=bits == 4)


def _fp8(given: Mapping[str, Any]) -> Scheme:
    _expect(given, "fmt", (None, "e4m3"))
    _warn_of_activations("float8")
    size = given.get("weight_block_size")
    if size is None:
        return Scheme("fp8", 8)
    rows, columns = _block("weight_block_size", size)
    return Scheme("fp8", 8, columns, rows)


def _block(field: str, given: Any) -> tuple[int, int]:
    """Read how many outputs and inputs share a scale."""
    is_pair = isinstance(given, list) and len(given) == 2
    if not is_pair or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in given):
        raise _refusal(field, given, "two whole numbers, of outputs and inputs that share a scale")
    rows, columns = given
    if columns % 2:
        raise _refusal(field, given, "an even number of inputs")
    return rows, columns


def _fbgemm(_: Mapping[str, Any]) -> Scheme:
    _warn_of_activations("float8")
    return Scheme("fbgemm_fp8", 8)


def _modelopt(given: Mapping[str, Any]) -> Scheme:
    _expect(given, "quant_algo", ("FP8", "NVFP4"))
    if given["quant_algo"] == "NVFP4":
        _expect({"group_size": given.get("group_size", _NVFP4_GROUP)}, "group_size", (_NVFP4_GROUP,))
        _warn_of_activations("4-bit float", bits=4)
        return Scheme("modelopt", 4, _NVFP4_GROUP, scale_bytes=1, has_table=True, has_factors=True)
    _warn_of_activations("float8")
    return Scheme("modelopt", 8)


def _bitsandbytes(given: Mapping[str, Any]) -> Scheme:
    in_4_bits, in_8_bits = (bool(given.get(f"load_in_{bits}bit", given.get(f"_load_in_{bits}bit"))) for bits in (4, 8))
    if in_4_bits == in_8_bits:
        raise _refusal("load_in_4bit, load_in_8bit", f"{in_4_bits}, {in_8_bits}", "one of them")
    if in_8_bits:
        _warn_of_activations("8-bit int")
        return Scheme("bitsandbytes", 8)
    _expect(given, "bnb_4bit_quant_storage", (None, "uint8"))
    return Scheme("bitsandbytes", 4, 64, has_table=True)


def _mxfp4(_: Mapping[str, Any]) -> Scheme:
    return Scheme("mxfp4", 4, 32, scale_bytes=1, has_table=True)


def _awq(given: Mapping[str, Any]) -> Scheme:
    _expect({"bits": given.get("bits", given.get("w_bit"))}, "bits", (4,))
    _expect({"version": str(given.get("version", "gemm")).lower()}, "version", ("gemm",))
    _expect(given, "zero_point", (True, None))
    return Scheme("awq", 4, _group_size(given.get("group_size", given.get("q_group_size", 128))), has_zeros=True)


def _gptq(given: Mapping[str, Any]) -> Scheme:
    _expect(given, "bits", (4, 8))
    _expect(given, "checkpoint_format", (None, "gptq", "gptq_v2"))
    _expect(given, "dynamic", (None, {}))
    is_first = given.get("checkpoint_format") != "gptq_v2"
    bits, size = given["bits"], _group_size(given.get("group_size", 128))
    return Scheme(
        "gptq", bits, size, zeros_less_one=is_first, has_zeros=bits == 4, has_order=bool(given.get("desc_act"))
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
}
"""Of each method that config.json may name."""


def _group_size(given: Any) -> int | None:
    if given == -1:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 2 or given % 2:
        raise _refusal("group_size", given, "an even whole number of inputs, or -1")
    return given


def _warn_of_activations(given: str, bits: int = 8) -> None:
    _log.warning(
        "quantization_config: given %s activations, which are not quantised here: the weights alone have %d bits, and "
        "results are those of activations in the model's dtype",
        given,
        bits,
    )


def _expect(given: Mapping[str, Any], field: str, allowed: tuple[Any, ...], place: str = "") -> None:
    if given.get(field) not in allowed:
        name = f"{place}.weights.{field}" if place else field
        raise _refusal(name, given.get(field), " or ".join(map(str, allowed)))


def _refusal(field: str, given: object, expected: str) -> UnsupportedModel:
    return UnsupportedModel(f"config.json: quantization_config.{field}: given {given}, expected {expected}")
