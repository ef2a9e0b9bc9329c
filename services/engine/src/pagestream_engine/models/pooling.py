"""What a model's files say of its pooling, and what becomes of pooled states: vectors, probabilities of labels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagestream_engine.errors import DOWNLOAD_AGAIN, ModelFileError
from pagestream_engine.plan import Float32Array
from pagestream_engine.sampling_params import CLS, LAST, MEAN, STATES_DTYPE


def vector_of(states: bytes, *, dimensions: int = 0, normalize: bool = True) -> Float32Array:
    """Return pooled states as a vector, cut first and normalised then, as in vLLM.

    Args:
        states: `SequenceOutput.pooled`.
        dimensions: leading numbers that are kept; 0: all.
        normalize: whether it is divided by its length; one of zeros stays.
    """
    vector: Float32Array = np.frombuffer(states, STATES_DTYPE)[: dimensions or None].astype(np.float32)
    if not normalize:
        return vector
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype(np.float32) if length else vector


def probabilities_of(states: bytes, activation: str) -> Float32Array:
    """Return the probabilities of a model's labels; its scores themselves by `IDENTITY`.

    Args:
        states: `SequenceOutput.pooled`: a score for each label.
        activation: `PoolingConfig.activation`.
    """
    scores = np.frombuffer(states, STATES_DTYPE).astype(np.float64)
    if activation == SOFTMAX:
        scores = np.exp(scores - scores.max())
        scores /= scores.sum()
    elif activation == SIGMOID:
        scores = 0.5 * (1.0 + np.tanh(0.5 * scores))  # without an overflow at either end
    return scores.astype(np.float32)


CLASSIFIER = "ForSequenceClassification"
"""End of the names of model classes with scores of labels in place of logits."""
SOFTMAX, SIGMOID, IDENTITY = "softmax", "sigmoid", "identity"
_PROBLEMS = {
    "single_label_classification": SOFTMAX,
    "multi_label_classification": SIGMOID,
    "regression": IDENTITY,
}
_MODULES = {
    "torch.nn.modules.activation.Sigmoid": SIGMOID,
    "torch.nn.modules.activation.Softmax": SOFTMAX,
    "torch.nn.modules.linear.Identity": IDENTITY,
}
"""Functions that sentence-transformers writes for models that compare two texts."""
_NUM_LABELS = 2
"""Of `transformers`, where a configuration names none."""


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels' names by their numbers; empty for a model that does not classify.

    Args:
        config: contents of `config.json`.

    Raises:
        ModelFileError: they are malformed.
    """
    architectures = config.get("architectures") or [""]
    if not (isinstance(architectures, list) and str(architectures[0]).endswith(CLASSIFIER)):
        return ()
    given = config.get("id2label")
    if given is None:
        return tuple(f"LABEL_{number}" for number in range(_NUM_LABELS))
    try:
        found = {int(number): str(name) for number, name in given.items()}
    except (AttributeError, TypeError, ValueError):
        found = {}
    if not found or sorted(found) != list(range(len(found))):
        raise ModelFileError(
            f"config.json: id2label: given {given!r:.80}, expected names by numbers from 0 on; {DOWNLOAD_AGAIN}"
        )
    return tuple(found[number] for number in range(len(found)))


def activation_of(config: Mapping[str, Any], labels: tuple[str, ...]) -> str:
    """Return SOFTMAX, SIGMOID or IDENTITY, as vLLM.

    By the problem's type, else by the function of sentence-transformers, else by the number of labels.

    Raises:
        ModelFileError: the type, or the function, is none that there is.
    """
    problem = config.get("problem_type")
    by_count = SOFTMAX if len(labels) > 1 else SIGMOID  # the softmax of one number is 1
    if problem is None:
        named = _activation_module(config)
        if named is None:
            return by_count
        if named not in _MODULES:
            raise ModelFileError(
                f"config.json: activation function: given {named!r:.80}, expected one of {', '.join(_MODULES)}; "
                f"{DOWNLOAD_AGAIN}"
            )
        return IDENTITY if _MODULES[named] == IDENTITY else by_count
    if problem not in _PROBLEMS:
        raise ModelFileError(
            f"config.json: problem_type: given {problem!r:.80}, expected one of {', '.join(_PROBLEMS)}; "
            f"{DOWNLOAD_AGAIN}"
        )
    return by_count if _PROBLEMS[problem] == SOFTMAX else _PROBLEMS[problem]


def _activation_module(config: Mapping[str, Any]) -> object:
    """Return the name of a function by sentence-transformers, in its present spelling or its first; None without."""
    written = config.get("sentence_transformers")
    if isinstance(written, Mapping) and "activation_fn" in written:
        return written["activation_fn"]
    return config.get("sbert_ce_default_activation_function")


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
