"""Which model to serve, and under which name; where the demo model is."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from pagestream_cli.errors import UsageError

REPOSITORY = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@[\w./-]+)?")
"""With `@` and a branch, tag or commit, of that."""
ADAPTER_FILE, BASE_FIELD = "adapter_config.json", "base_model_name_or_path"
DEMO_MODEL_NAME = "demo"
"""Served name of the demo model."""


@dataclass(frozen=True)
class ModelChoice:
    """A model and its served name."""

    source: str
    """A folder, or the name of a Hugging Face repository, which the engine resolves."""
    name: str
    adapter: AdapterChoice | None = None
    """A LoRA adapter of it, where the folder of one was named."""


@dataclass(frozen=True)
class AdapterChoice:
    """A LoRA adapter and its served name."""

    folder: Path
    name: str


def choose_model(model: str | None, served_model_name: str | None) -> ModelChoice:
    """Choose the model and its served name. A folder is checked before any process starts, a repository by the engine.

    The folder of a LoRA adapter means its base model with this adapter, whose name `served_model_name` then is.

    Raises:
        UsageError: there is no such folder, or it holds no model.
    """
    if model is None:
        return ModelChoice(str(find_demo_model()), served_model_name or DEMO_MODEL_NAME)
    if not Path(model).exists() and _is_gguf(model):
        raise UsageError(f"{model}: GGUF isn't read", hint="name the safetensors model that it was made from")
    if not Path(model).exists() and (repository := REPOSITORY.fullmatch(model)) is not None:
        return ModelChoice(model, served_model_name or repository["name"])
    folder = Path(model).expanduser().absolute()
    if (folder / ADAPTER_FILE).is_file() and not (folder / "config.json").exists():
        base = choose_model(_base_of(folder), None)
        if base.adapter is not None:
            raise UsageError(f"{model}: its base model {base.adapter.folder} is an adapter too")
        return replace(base, adapter=AdapterChoice(folder, served_model_name or folder.name))
    if problem := model_problem(folder):
        raise UsageError(
            f"{model}: {problem}",
            hint="name a folder with config.json, *.safetensors and tokenizer.json, as Hugging Face publishes them",
        )
    return ModelChoice(str(folder), served_model_name or folder.name)


def _base_of(folder: Path) -> str:
    """Return the base model that an adapter names: a repository, or a folder, also one beside the adapter."""
    path = folder / ADAPTER_FILE
    try:
        base = json.loads(path.read_text()).get(BASE_FIELD)
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(base, str) or not base:
        raise UsageError(
            f"{path} names no base model",
            hint=f"set {BASE_FIELD}, or serve the base model and load the adapter",
        )
    beside = folder / Path(base).expanduser()
    return str(beside) if beside.is_dir() else base


def model_problem(folder: Path) -> str | None:
    """Return why a folder is no model; None where it is one. Weights are not read."""
    if folder.is_file():
        return "a GGUF file, which isn't read" if _is_gguf(folder.name) else "a file, not a folder"
    if not folder.is_dir():
        return "no such folder"
    config = folder / "config.json"
    if not config.is_file():
        return f"the folder has no config.json{_other_weights(folder)}"
    try:
        json.loads(config.read_text())
    except (OSError, ValueError) as error:
        return f"config.json cannot be read: {error}"
    return _files_problem(folder)


def _files_problem(folder: Path) -> str | None:
    if not any(folder.glob("*.safetensors")):
        return f"the folder has no *.safetensors{_other_weights(folder)}"
    if (missing := _missing_shard(folder)) is not None:
        return f"{missing}: no such file, expected weights as safetensors; convert or download them"
    if not (folder / "tokenizer.json").is_file():
        return "the folder has no tokenizer.json"
    return None


def _other_weights(folder: Path) -> str:
    """Return what else a folder has, as the end of a sentence."""
    for pattern in ("*.gguf", "*.bin", "*.pt", "*.pth", "*.onnx"):
        if (found := next(iter(sorted(folder.glob(pattern))), None)) is not None:
            return f"; {found.name} isn't read: convert it, or download the model as safetensors"
    return ""


def _missing_shard(folder: Path) -> str | None:
    """Return a file that the weights' index names and the folder lacks."""
    try:
        files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()
        return next((name for name in sorted(set(files)) if not (folder / name).is_file()), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # there is none, or the engine says what is wrong with it


def _is_gguf(name: str) -> bool:
    return name.partition("@")[0].lower().endswith("gguf")


def has_tokenizer_of(model: str | None, other: str) -> bool:
    """Return whether two folders have the same tokenizer."""
    folder = find_demo_model() if model is None else Path(model).expanduser()
    files = [place / "tokenizer.json" for place in (folder, Path(other).expanduser())]
    try:
        return files[0].read_bytes() == files[1].read_bytes()
    except OSError:
        return False


def demo_model_places() -> tuple[Path, ...]:
    """Return the folders that may hold the demo model: in an installed wheel, or in the checkout of this package."""
    package = Path(__file__).resolve().parents[1]
    checkout = package.parents[3]
    return (package / "demo_model", checkout / "deploy" / "demo-model" / "model")


def find_demo_model() -> Path:
    """Find the folder of the demo model.

    Raises:
        UsageError: this installation does not include it.
    """
    for place in demo_model_places():
        if (place / "config.json").is_file():
            return place
    raise UsageError(
        "this installation has no demo model",
        hint="name a model folder: pagestream serve MODEL; in a checkout, `make demo-model` trains the demo model",
    )
