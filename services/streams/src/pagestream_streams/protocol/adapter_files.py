"""The files of a LoRA adapter in PEFT's format, as far as they can be checked without its base model.

No tensor is read. Whether the matrices fit a model is found by the engine that first reads them.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from pagestream_streams.errors import AdapterRefused

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_MOST_CONFIG_BYTES = 1 << 20
_MOST_HEADER_BYTES = 16 << 20
_LENGTH_BYTES = 8
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}


def check_adapter_files(folder: Path) -> None:
    """Check an adapter's configuration, and the header of its weights against the size of their file.

    Raises:
        AdapterRefused: a file can't be read, is cut off or malformed, or is none of a LoRA adapter.
    """
    config, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    try:
        _check_config(config)
        _check_weights(weights)
    except OSError as error:
        raise AdapterRefused(
            f"{error.filename or folder}: {error.strerror or error}; expected an adapter in PEFT's format that can be "
            "read here, or its revision beside its path"
        ) from error


def _check_config(path: Path) -> None:
    with path.open("rb") as file:
        fields = _json_object(path, file.read(_MOST_CONFIG_BYTES + 1), _MOST_CONFIG_BYTES)
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterRefused(f"{path}: peft_type: given {kind!r:.80}, expected LORA")


def _check_weights(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise AdapterRefused(
                f"{path}: given a header of {length} bytes in a file of {size}, expected a safetensors file"
            )
        header = _json_object(path, file.read(length), _MOST_HEADER_BYTES)
    header.pop("__metadata__", None)
    ranks: dict[str, dict[str, int]] = {}
    for name, fields in header.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise AdapterRefused(
                f"{path}: {name}: given a tensor that is neither lora_A nor lora_B of a linear, expected no other"
            )
        rows, columns = _checked_shape(path, name, fields, size - _LENGTH_BYTES - length)
        ranks.setdefault(found["module"], {})[found["matrix"]] = rows if found["matrix"] == "A" else columns
    if not ranks:
        raise AdapterRefused(f"{path}: given no tensors, expected lora_A and lora_B of at least one module")
    for module, of_matrices in ranks.items():
        if set(of_matrices) != {"A", "B"} or len(set(of_matrices.values())) > 1:
            raise AdapterRefused(
                f"{path}: {module}: given ranks {of_matrices}, expected one of lora_A and lora_B together"
            )


def _checked_shape(path: Path, name: str, fields: Any, num_bytes: int) -> tuple[int, int]:
    """Return rows and columns of a tensor whose bytes lie in the file's part of so many bytes after the header."""
    try:
        dtype, (rows, columns), (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        is_whole = all(type(each) is int and each >= 0 for each in (rows, columns, begin, end))
        is_sound = is_whole and end - begin == math.prod((rows, columns, _DTYPE_BYTES[dtype])) and end <= num_bytes
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise AdapterRefused(
            f"{path}: {name}: given {fields!r:.120}, expected a matrix of {', '.join(_DTYPE_BYTES)} whose bytes lie "
            "within the file; it may be cut off"
        )
    return rows, columns


def _json_object(path: Path, text: bytes, most_bytes: int) -> dict[str, Any]:
    if len(text) > most_bytes:
        raise AdapterRefused(f"{path}: given more than {most_bytes} bytes, expected fewer")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AdapterRefused(f"{path}: unreadable, expected a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise AdapterRefused(f"{path}: given a {type(found).__name__}, expected a JSON object")
    return found
