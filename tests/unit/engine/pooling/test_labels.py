"""What makes probabilities of scores, by a model's configuration."""

from typing import Any

import pytest
from pagestream_engine.errors import ModelFileError
from pagestream_engine.pooling.labels import IDENTITY, SIGMOID, SOFTMAX, activation_of

SIGMOID_MODULE = "torch.nn.modules.activation.Sigmoid"
IDENTITY_MODULE = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("config", "num_labels", "expected"),
    [
        ({}, 1, SIGMOID),
        ({}, 2, SOFTMAX),
        ({"problem_type": "single_label_classification"}, 1, SIGMOID),
        ({"problem_type": "single_label_classification"}, 2, SOFTMAX),
        ({"sentence_transformers": {"version": "5"}}, 1, SIGMOID),
        ({"sentence_transformers": {"activation_fn": IDENTITY_MODULE}}, 1, IDENTITY),
        ({"sbert_ce_default_activation_function": IDENTITY_MODULE}, 1, IDENTITY),
        ({"sentence_transformers": {"activation_fn": SIGMOID_MODULE}}, 1, SIGMOID),
        ({"sentence_transformers": {"activation_fn": SIGMOID_MODULE}}, 3, SOFTMAX),
        ({"problem_type": "regression", "sentence_transformers": {"activation_fn": SIGMOID_MODULE}}, 1, IDENTITY),
    ],
)
def test_the_function_of_scores(config: dict[str, Any], num_labels: int, expected: str) -> None:
    assert activation_of(config, ("label",) * num_labels) == expected


@pytest.mark.parametrize("given", ["os.system", "torch.nn.modules.activation.GELU", 3])
def test_an_unknown_function_is_refused(given: object) -> None:
    with pytest.raises(ModelFileError, match=r"activation function: given .*, expected one of torch"):
        activation_of({"sentence_transformers": {"activation_fn": given}}, ("label",))
