"""Adapters' files that are refused when they are loaded, before a request meets them."""

import json
from pathlib import Path
from typing import Any

import pytest
from pagestream_streams import AdapterRefused
from pagestream_streams.protocol.adapter_files import check_adapter_files

A, B = "base_model.model.layers.0.q_proj.lora_A.weight", "base_model.model.layers.0.q_proj.lora_B.weight"


def tensor(shape: list[int], begin: int, dtype: str = "F32", *, num_bytes: int | None = None) -> dict[str, Any]:
    size = 4 * shape[0] * shape[1] if num_bytes is None else num_bytes
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}


SOUND = {"__metadata__": {"format": "pt"}, A: tensor([2, 3], 0), B: tensor([5, 2], 24)}


def write(folder: Path, header: Any = SOUND, *, config: Any = "", num_bytes: int = 64) -> Path:
    (folder / "adapter_config.json").write_text(config or json.dumps({"peft_type": "LORA", "r": 2}))
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes))
    return folder


def test_sound_files_pass(tmp_path: Path) -> None:
    check_adapter_files(write(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_bytes": 63}, "lora_B.weight: given .* may be cut off"),
        ({"header": {A: SOUND[A]}}, "given ranks {'A': 2}, expected one of lora_A and lora_B"),
        ({"header": {A: SOUND[A], B: tensor([5, 1], 24)}}, "given ranks {'A': 2, 'B': 1}"),
        ({"header": {A: SOUND[A], "lm_head.weight": tensor([1, 1], 24)}}, "neither lora_A nor lora_B"),
        ({"header": {A: tensor([2, 3], 0, "I64")}}, "a matrix of F64"),
        ({"header": {A: tensor([2, 3], 0, num_bytes=23)}}, "bytes lie within"),
        ({"header": {A: [1]}}, "bytes lie within"),
        ({"header": {A: tensor([-2, -3], 0)}}, "bytes lie within"),
        ({"header": {}}, "given no tensors"),
        ({"header": []}, "given a list, expected a JSON object"),
        ({"config": "["}, "adapter_config.json: unreadable"),
        ({"config": "[" * 100_000}, "adapter_config.json: unreadable"),
        ({"config": '{"peft_type": "IA3"}'}, "peft_type: given 'IA3', expected LORA"),
        ({"config": " " * (1 << 20) + "{}"}, "given more than 1048576 bytes"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterRefused, match=message):
        check_adapter_files(write(tmp_path, **changes))


def test_files_that_are_missing_or_no_safetensors(tmp_path: Path) -> None:
    with pytest.raises(AdapterRefused, match=r"adapter_config.json: No such file .* or its revision beside its path"):
        check_adapter_files(tmp_path)
    (write(tmp_path) / "adapter_model.safetensors").write_bytes(b"PK\3\4" * 4)
    with pytest.raises(AdapterRefused, match=r"given a header of .* in a file of 16, expected a safetensors file"):
        check_adapter_files(tmp_path)
