"""Probabilities of labels are those of `transformers`, of any kind of problem, with ranks, int8 weights and chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.errors import InvalidRequest, ModelFileError
from support.engines.classifiers import make_classifier
from support.engines.tiny_models import make_model, random_prompts

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 32, "block_size": 4}
PROMPTS = random_prompts([1, 9, 23, 30])
TOLERANCE = 1e-4


def scores(folder: Path) -> torch.Tensor:
    """Return the reference's scores: (prompts, labels)."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])


def found(llm: LLM) -> torch.Tensor:
    outputs = llm.classify([{"prompt_token_ids": prompt} for prompt in PROMPTS])
    return torch.tensor([output.probs for output in outputs])


@pytest.mark.parametrize(
    ("name", "num_labels", "changes", "options", "activation"),
    [
        ("qwen3", 3, {}, {"max_num_batched_tokens": 7}, lambda x: x.softmax(-1)),
        ("llama", 1, {}, {}, torch.sigmoid),
        ("gemma2", 3, {"problem_type": "multi_label_classification"}, {}, torch.sigmoid),
        ("qwen2", 1, {"problem_type": "regression"}, {}, lambda x: x),
        pytest.param("llama", 3, {}, {"tensor_parallel_size": 2}, lambda x: x.softmax(-1), marks=pytest.mark.slow),
        pytest.param("llama", 3, {}, {"pipeline_parallel_size": 2}, lambda x: x.softmax(-1), marks=pytest.mark.slow),
    ],
)
def test_probabilities_are_those_of_transformers(
    tmp_path: Path, *, name: str, num_labels: int, changes: dict[str, Any], options: dict[str, Any], activation: Any
) -> None:
    folder = make_classifier(tmp_path / "model", name, num_labels, **changes)
    llm = LLM(folder, **{**OPTIONS, **options})
    try:
        expected = activation(scores(folder))
        assert expected.std() > 0.01
        torch.testing.assert_close(found(llm), expected, atol=TOLERANCE, rtol=TOLERANCE)
        with pytest.raises(InvalidRequest, match="scores of labels and no vectors"):
            llm.embed([{"prompt_token_ids": PROMPTS[0]}])
        with pytest.raises(InvalidRequest, match="has no head"):
            llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=1))
    finally:
        llm.engine.close()


def test_refusals(tmp_path: Path) -> None:
    plain = LLM(make_model(tmp_path / "plain", "llama"), **OPTIONS)
    with pytest.raises(InvalidRequest, match="a model without labels"):
        plain.classify("text")
    folder = make_classifier(tmp_path / "model", "llama", 2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"1": "a"}}))
    with pytest.raises(ModelFileError, match="id2label"):
        LLM(folder, **OPTIONS)
