"""How a model's vectors are made, by its files: those of sentence-transformers where it has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagestream_engine.errors import DOWNLOAD_AGAIN, ModelFileError
from pagestream_engine.pooling.labels import activation_of, labels_of
from pagestream_engine.sampling_params import CLS, LAST, MEAN

_KNOWN = ("Transformer", "Pooling", "Normalize")
"""Last parts of the names of modules that change no vector otherwise than told here."""
_MODES = {"pooling_mode_lasttoken": LAST, "pooling_mode_mean_tokens": MEAN, "pooling_mode_cls_token": CLS}
_CLASSIFIES = "the model gives scores of labels and no vectors"
_NAMES = {"lasttoken": LAST, "mean": MEAN, "cls": CLS}


@dataclass(frozen=True)
class PoolingConfig:
    """What a model's files say of its vectors."""

    kind: str = LAST
    normalize: bool = True
    """Whether vectors have length 1: as `modules.json` says; without that file they have, as in vLLM."""
    is_matryoshka: bool = False
    """Whether leading numbers of a vector are a vector too."""
    dimensions: tuple[int, ...] = ()
    """Of how many numbers those may be; empty: of any number."""
    labels: tuple[str, ...] = ()
    """Of a model that classifies: it gives a score for each, and no vectors."""
    activation: str = ""
    """What makes probabilities of these scores: SOFTMAX, SIGMOID or IDENTITY; empty for a model without labels."""
    joins_pairs: bool = False
    """Whether a model that compares two texts reads them without what its tokenizer puts between (`use_sep_token`)."""
    unsupported: str = ""
    """Why there are no vectors: what the files ask for, which the engine does not do. Empty where there are."""

    def allows(self, dimensions: int, size: int) -> bool:
        """Whether vectors of `size` numbers may be cut to so many."""
        if not self.is_matryoshka or not 1 <= dimensions <= size:
            return dimensions == size
        return not self.dimensions or dimensions in self.dimensions


def read_pooling(folder: Path) -> PoolingConfig:
    """Read a model folder: `modules.json`, the `config.json` of its pooling module, and the model's `config.json`.

    Raises:
        ModelFileError: a file is malformed.
    """
    config = _read(folder / "config.json")
    is_matryoshka, dimensions = _matryoshka(folder / "config.json", config)
    labels = labels_of(config)
    if labels:
        return PoolingConfig(
            labels=labels,
            activation=activation_of(config, labels),
            joins_pairs=config.get("use_sep_token") is False,
            unsupported=_CLASSIFIES,
        )
    modules_file = folder / "modules.json"
    if not modules_file.is_file():
        return PoolingConfig(is_matryoshka=is_matryoshka, dimensions=dimensions)
    modules = _read(modules_file, kind=list)
    if not all(isinstance(module, dict) for module in modules):
        raise ModelFileError(f"{modules_file}: expected a list of objects; {DOWNLOAD_AGAIN}")
    kind, unsupported, normalize = LAST, "", False
    for module in modules:
        name = str(module.get("type", "")).rpartition(".")[2]
        if name not in _KNOWN:
            unsupported = unsupported or f"modules.json asks for a module {name!r}"
        elif name == "Normalize":
            normalize = True
        elif name == "Pooling":
            path = folder / str(module.get("path", "")) / "config.json"
            kind, reason = _kind(path, _read(path))
            unsupported = unsupported or reason
    return PoolingConfig(kind, normalize, is_matryoshka, dimensions, unsupported=unsupported)


def _kind(path: Path, config: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind of a pooling module, and what it asks for beyond."""
    named = config.get("pooling_mode")
    if named is not None:
        return _NAMES.get(str(named), LAST), "" if named in _NAMES else f"{path.parent.name} asks for {named!r}"
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) == 1 and modes[0] in _MODES:
        return _MODES[modes[0]], ""
    asked = " and ".join(name.removeprefix("pooling_mode_") for name in modes) or "no pooling"
    return LAST, f"{path.parent.name} asks for {asked}"


def _matryoshka(path: Path, config: Mapping[str, Any]) -> tuple[bool, tuple[int, ...]]:
    given = config.get("matryoshka_dimensions") or []
    if not isinstance(given, list) or not all(type(each) is int and each > 0 for each in given):
        raise ModelFileError(f"{path}: matryoshka_dimensions: given {given!r}, expected a list of whole numbers")
    return bool(given) or config.get("is_matryoshka") is True, tuple(given)


def _read(path: Path, kind: type = dict) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: unreadable: {error}; {DOWNLOAD_AGAIN}") from error
    if not isinstance(content, kind):
        expected = "a list" if kind is list else "an object"
        raise ModelFileError(f"{path}: given a {type(content).__name__}, expected {expected}; {DOWNLOAD_AGAIN}")
    return content
