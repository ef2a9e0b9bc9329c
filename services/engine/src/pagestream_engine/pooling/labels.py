"""What a model that classifies gives: the names of its labels, and what makes probabilities of their scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagestream_engine.errors import DOWNLOAD_AGAIN, ModelFileError

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
