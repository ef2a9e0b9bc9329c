"""Sound files of a LoRA adapter, for no model, without torch."""

import json
from pathlib import Path


def write_adapter(folder: Path, rank: int = 1) -> Path:
    """Write an adapter of one module to a folder; another rank is another revision."""
    name, shapes = "base_model.model.layer.lora_{}.weight", {"A": [rank, 1], "B": [1, rank]}
    header = {
        name.format(matrix): {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [4 * rank * place, 4 * rank * (place + 1)],
        }
        for place, (matrix, shape) in enumerate(shapes.items())
    }
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 1}))
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8 * rank))
    return folder
