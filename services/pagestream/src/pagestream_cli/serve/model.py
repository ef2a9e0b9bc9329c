"""Which model to serve, and under which name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from pagestream_cli.demo import DEMO_MODEL_NAME, find_demo_model
from pagestream_cli.errors import UsageError

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class ModelChoice:
    """A model and its served name."""

    source: str
    """A folder, or the name of a Hugging Face repository, which the engine finds."""
    name: str


def choose_model(model: str | None, served_model_name: str | None) -> ModelChoice:
    """Check a folder before any process starts; the engine looks for a repository.

    Raises:
        UsageError: there is no such folder, or it holds no model.
    """
    if model is None:
        return ModelChoice(str(find_demo_model()), served_model_name or DEMO_MODEL_NAME)
    if not Path(model).exists() and REPOSITORY.fullmatch(model):
        return ModelChoice(model, served_model_name or model.rpartition("/")[2])
    folder = Path(model).expanduser().absolute()
    if problem := model_problem(folder):
        raise UsageError(
            f"{model}: {problem}",
            hint="name a folder with config.json, *.safetensors and tokenizer.json, as Hugging Face publishes them",
        )
    return ModelChoice(str(folder), served_model_name or folder.name)


def model_problem(folder: Path) -> str | None:
    """What keeps a folder from being a model; None when nothing does. Weights are not read."""
    if not folder.is_dir():
        return "no such folder"
    config = folder / "config.json"
    if not config.is_file():
        return "the folder has no config.json"
    try:
        json.loads(config.read_text())
    except (OSError, ValueError) as error:
        return f"config.json cannot be read: {error}"
    if not any(folder.glob("*.safetensors")):
        return "the folder has no *.safetensors"
    if not (folder / "tokenizer.json").is_file():
        return "the folder has no tokenizer.json"
    return None
