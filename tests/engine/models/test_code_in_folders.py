"""What lies in a model's folder is data: no code in it runs, whoever is asked."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from pagestream_engine import LLM, ModelError

pytestmark = pytest.mark.served

_OWN_CODE = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel", "AutoTokenizer": "own.OwnTokenizer"}


class _Touch:
    """A pickle of it makes a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self._path), "w")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code and pickles that leave the file `ran`; who is asked agrees."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    ran = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("own.py", "modeling_own.py", "configuration_own.py", "tokenization_own.py", "__init__.py"):
        (folder / name).write_text(f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n")
    for name in ("pytorch_model.bin", "model.safetensors"):
        (folder / name).write_bytes(pickle.dumps(_Touch(ran)))
    return folder


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("own", "OwnModel"), ("own", "GPT2LMHeadModel"), ("gpt2", "GPT2LMHeadModel"), ("llama", "LlamaForCausalLM")],
)
def test_a_models_folder_runs_nothing(folder: Path, model_type: str, architecture: str) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = {"model_type": model_type, "architectures": [architecture], "auto_map": _OWN_CODE, "vocab_size": 16}
    (folder / "config.json").write_text(json.dumps(config | sizes | {"max_position_embeddings": 128}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": _OWN_CODE}))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError):
        LLM(str(folder))
    assert not (folder.parent / "ran").exists()
