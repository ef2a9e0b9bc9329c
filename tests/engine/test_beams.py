"""Beam search beside that of `transformers`: equal tokens and scores, whatever the pool and the neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, CompletionOutput, SamplingParams
from support.engines.tiny_models import random_prompts, reference_model

pytestmark = pytest.mark.served

DEMO_MODEL = Path(__file__).parents[2] / "deploy/demo-model/model"
NUM_TOKENS = 14
ENDS = [2, 5, 9, 21, 33, 48, 60, 77]
"""Tokens that end an output, so that a random model's outputs do end."""
LENGTHS = [3, 16, 21]
CASES: list[dict[str, Any]] = [
    {"width": 4, "n": 2, "length_penalty": 2.0, "early_stopping": True},
    {"width": 4, "n": 1, "length_penalty": 0.0, "early_stopping": "never"},
    {"width": 8, "n": 3, "length_penalty": -0.5},
    {"width": 1, "n": 1},
    {"width": 8, "n": 8, "length_penalty": 1.3, "early_stopping": "never"},
    {"width": 8, "n": 2, "early_stopping": True, "min_tokens": 5},
    {"width": 4, "n": 4},
]


def make_llm(folder: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 256, "block_size": 8}
    return LLM(folder, **{**defaults, **options})


def search_params(case: dict[str, Any], *, max_tokens: int, ends: list[int]) -> SamplingParams:
    given = {key: value for key, value in case.items() if key != "width"}
    return SamplingParams(
        use_beam_search=True,
        beam_width=case["width"],
        max_tokens=max_tokens,
        stop_token_ids=ends,
        ignore_eos=True,
        include_stop_str_in_output=True,
        **given,
    )


def scored(choice: CompletionOutput, length_penalty: float) -> tuple[list[int], float]:
    assert choice.cumulative_logprob is not None
    return choice.token_ids, choice.cumulative_logprob / len(choice.token_ids) ** length_penalty


def expected(
    model: Any, prompt: list[int], case: dict[str, Any], *, max_tokens: int, ends: list[int]
) -> list[tuple[list[int], float]]:
    """What `transformers` returns, without the padding after an output's end."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=case["width"],
        num_return_sequences=case["n"],
        length_penalty=case.get("length_penalty", 1.0),
        early_stopping=case.get("early_stopping", False),
        min_new_tokens=case.get("min_tokens"),
        max_new_tokens=max_tokens,
        eos_token_id=ends,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    if case["width"] == 1:  # `transformers` has no scores then
        tokens = result.sequences[0, len(prompt) :]
        scores = model.compute_transition_scores(result.sequences, result.scores, normalize_logits=True)
        return [(tokens.tolist(), float(scores.sum()) / len(tokens))]
    outputs = []
    for sequence, score in zip(result.sequences, result.sequences_scores.tolist(), strict=True):
        tokens = sequence[len(prompt) :].tolist()
        length = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
        outputs.append((tokens[:length], score))
    return outputs


def check(found: list[tuple[list[int], float]], wanted: list[tuple[list[int], float]]) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    for (_, score), (_, other) in zip(found, wanted, strict=True):
        assert score == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("case", [*CASES[:4], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[4:])])
def test_equals_transformers_on_a_random_model(llama: Path, case: dict[str, Any]) -> None:
    model, llm = reference_model(llama), make_llm(llama)
    params = search_params(case, max_tokens=NUM_TOKENS, ends=ENDS)
    prompts = random_prompts(LENGTHS)
    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        found = [scored(choice, params.length_penalty) for choice in output.outputs]
        check(found, expected(model, prompt, case, max_tokens=NUM_TOKENS, ends=ENDS))
        for choice in output.outputs:
            assert choice.finish_reason == ("stop" if choice.token_ids[-1] in ENDS else "length")
    llm.engine.check_invariants()
    assert llm.engine.stats().num_free_blocks == 256


def test_equals_transformers_on_the_demo_model() -> None:
    case = CASES[0]
    model, llm = reference_model(DEMO_MODEL), make_llm(DEMO_MODEL, block_size=16)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    prompt, ends = tokenizer.encode("Who lives in the mill").ids, sorted(llm.engine.eos_token_ids)
    params = search_params(case, max_tokens=24, ends=ends)
    (output,) = llm.generate([prompt], params)
    found = [scored(choice, params.length_penalty) for choice in output.outputs]
    check(found, expected(model, prompt, case, max_tokens=24, ends=ends))
    assert output.outputs[0].text == tokenizer.decode(found[0][0], skip_special_tokens=True)


@pytest.mark.parametrize("ahead", [False, True])
def test_beams_are_preempted_and_resumed_together(llama: Path, ahead: bool) -> None:
    """In a pool for half of the requests, between others that are sampled: outputs of a search that runs alone."""
    prompts = random_prompts([13, 30, 21, 9, 17, 26])
    search = search_params({"width": 4, "n": 2, "logprobs": 2}, max_tokens=20, ends=ENDS)
    other = SamplingParams(max_tokens=24, seed=3, ignore_eos=True)
    given = [search, other, search, other, search, other]
    calm = [make_llm(llama).generate([prompt], params)[0] for prompt, params in zip(prompts, given, strict=True)]
    tight = make_llm(llama, num_gpu_blocks_override=24, max_num_batched_tokens=24, async_scheduling=ahead)
    for output, alone in zip(tight.generate(prompts, given), calm, strict=True):
        assert [choice.token_ids for choice in output.outputs] == [choice.token_ids for choice in alone.outputs]
        for choice in output.outputs if alone.outputs[0].logprobs else []:
            chosen = [row[token] for row, token in zip(choice.logprobs or [], choice.token_ids, strict=True)]
            assert sum(token.logprob for token in chosen) == pytest.approx(choice.cumulative_logprob, abs=1e-4)
            assert all(len(row) <= 3 for row in choice.logprobs or [])
    stats = tight.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks


def test_beams_share_all_but_the_blocks_that_they_write(llama: Path) -> None:
    """Eight beams of a prompt of 100 tokens hold its 12 full blocks once, and what follows by as many as part there."""
    llm = make_llm(llama, enable_prefix_caching=False)
    (prompt,) = random_prompts([100])
    engine, width, most = llm.engine, 8, 0
    params = search_params({"width": width, "n": 1}, max_tokens=24, ends=ENDS).for_child(0, 0)
    engine.add_request("a", prompt, params)
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_invariants()
        most = max(most, engine.stats().num_blocks - engine.stats().num_free_blocks)
    assert 12 + width <= most <= 12 + 4 * width
    assert most < width * 13 / 2
