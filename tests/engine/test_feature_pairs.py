"""All pairs of features in one engine: the tokens of an engine that has neither, or the refusal that names both.

What changes logits (an adapter, int8 weights) or the form of an answer (a grammar, beams, several choices) is in the
reference as well, which runs one request after another, in a pool with room for all of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pagestream_engine import LLM, ConfigError, EngineError, LoRARequest, SamplingParams, StructuredOutputsParams
from support.engines.lora_adapters import make_adapter
from support.engines.tiny_models import make_model, random_prompts

pytestmark = pytest.mark.served

DEMO_TOKENIZER = Path(__file__).parents[2] / "deploy" / "demo-model" / "model" / "tokenizer.json"
VOCAB_SIZE = 1536
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "deterministic": True,
    "block_size": 4,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 13,
    "num_gpu_blocks_override": 96,
    "enable_prefix_caching": False,
}
CHANGES: dict[str, dict[str, Any]] = {
    "adapter": {"enable_lora": True},
    "int8 weights": {"quantization": "int8"},
    "grammar": {},
    "beams": {},
    "two choices": {},
    "n-gram drafts": {"speculative_method": "ngram", "prompt_lookup_min": 1},
    "draft model": {"speculative_model": ""},
    "two ranks": {"tensor_parallel_size": 2},
    "prefix cache": {"enable_prefix_caching": True},
    "preemption": {"num_gpu_blocks_override": 20},
    "host pages": {"num_gpu_blocks_override": 20, "swap_space": 0.001, "enable_prefix_caching": True},
}
"""Options by feature; those that a request asks for have none."""
IN_REFERENCE = ("adapter", "int8 weights", "grammar", "beams", "two choices")
REFUSED: dict[tuple[str, ...], str] = {
    ("n-gram drafts", "draft model"): "speculative_model",
    ("grammar", "beams"): "structured_outputs",
}
PAIRS = list(combinations(CHANGES, 2))
MANY = (
    ("adapter", "int8 weights", "grammar", "two choices", "n-gram drafts", "prefix cache", "preemption", "host pages"),
    ("adapter", "int8 weights", "beams", "two choices", "n-gram drafts", "prefix cache", "preemption", "host pages"),
)
"""Together they have each pair, but of ranks and draft models and those that are refused: where one of them fails,
`make properties` says which pairs do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    made = make_model(folder, "llama", vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=1)
    shutil.copy(DEMO_TOKENIZER, made)
    return made


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    folder = make_adapter(model, tmp_path_factory.mktemp("adapter") / "adapter", seed=1)
    return LoRARequest("adapter", 1, str(folder))


def params_of(features: Sequence[str]) -> list[SamplingParams]:
    """Return one greedy request and two sampled ones, with what the pair asks of requests."""
    asked: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    if "grammar" in features:
        asked["structured_outputs"] = StructuredOutputsParams(regex="[a-f ]{60}")
    if "two choices" in features or "beams" in features:
        asked["n"] = 2
    if "beams" in features:
        asked["max_tokens"] = 12  # all beams of a request have to fit into the smallest pool
        return [SamplingParams(**asked, use_beam_search=True, beam_width=3) for _ in range(3)]
    drawn = [SamplingParams(**asked, temperature=0.9, seed=seed) for seed in (1, 2)]
    return [SamplingParams(**asked, temperature=0.0), *drawn]


def tokens_of(llm: LLM, features: Sequence[str], adapter: LoRARequest, *, together: bool) -> list[list[list[int]]]:
    """Return the tokens of each choice of each request."""
    prompts, params = [prompt * 2 for prompt in random_prompts([5, 9, 11])], params_of(features)
    named = adapter if "adapter" in features else None
    if together:
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=named)
    else:
        outputs = [
            llm.generate([prompt], each, use_tqdm=False, lora_request=named)[0]
            for prompt, each in zip(prompts, params, strict=True)
        ]
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


def check(model: Path, adapter: LoRARequest, features: Sequence[str]) -> None:
    """Compare the tokens of requests that run together, twice, with those of an engine that has none of the rest."""
    options = dict(OPTIONS)
    for each in features:
        options |= CHANGES[each]
    if "speculative_model" in options:
        options["speculative_model"] = str(model)
    of_reference = {name: value for each in features if each in IN_REFERENCE for name, value in CHANGES[each].items()}
    expected = tokens_of(LLM(model, **{**OPTIONS, **of_reference}), features, adapter, together=False)
    llm = LLM(model, **options)
    try:
        for _ in range(2):
            assert tokens_of(llm, features, adapter, together=True) == expected
        stats = llm.engine.stats()
        # A search waits for room for all of its beams, and has no drafts; drafts make sequences end at other steps.
        has_drafts = bool({"n-gram drafts", "draft model"} & {*features})
        assert stats.prefix_hit_tokens > 0 or "prefix cache" not in features
        assert stats.num_preemptions > 0 or "preemption" not in features or has_drafts or "beams" in features
        # What the grammar forbids is no draft, which may be all that the draft model has.
        assert stats.num_draft_tokens > 0 or not has_drafts or {"beams", "grammar"} & {*features}
    finally:
        llm.engine.close()


@pytest.mark.usefixtures("most_drafts")
@pytest.mark.parametrize("features", MANY, ids=["grammar", "beams"])
def test_many_features_change_no_token(model: Path, adapter: LoRARequest, features: Sequence[str]) -> None:
    check(model, adapter, features)


@pytest.mark.parametrize("pair", REFUSED, ids=" + ".join)
def test_pairs_that_are_refused(model: Path, adapter: LoRARequest, pair: Sequence[str]) -> None:
    options = {**OPTIONS, **CHANGES[pair[0]], **CHANGES[pair[1]]}
    if "speculative_model" in options:
        options["speculative_model"] = str(model)
    with pytest.raises((ConfigError, EngineError, ValueError), match=REFUSED[pair]):
        tokens_of(LLM(model, **options), pair, adapter, together=True)


@pytest.mark.slow
@pytest.mark.usefixtures("most_drafts", "ranks")
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in REFUSED], ids=" + ".join)
def test_a_pair_of_features_changes_no_token(model: Path, adapter: LoRARequest, pair: Sequence[str]) -> None:
    check(model, adapter, pair)
