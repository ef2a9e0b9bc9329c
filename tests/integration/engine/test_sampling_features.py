"""Penalties, bias and log probabilities through the whole engine, against `transformers` and across interruptions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, Engine, EngineConfig, SamplingParams
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.request.outputs import RequestOutput, StepOutput
from support.engines.tiny_models import VOCAB_SIZE, make_model, random_prompts, reference_model

NUM_TOKENS = 24
LENGTHS = [3, 17, 40, 16]
EVERYTHING: dict[str, Any] = {
    "presence_penalty": 0.7,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {11: 4.0, 12: -50.0},
    "min_tokens": 5,
    "logprobs": 3,
    "max_tokens": NUM_TOKENS,
    "temperature": 0.8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_llm(folder)


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 128, **options})


def generate(llm: LLM, *prompts: list[int], **params: Any) -> list[RequestOutput]:
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params}
    return llm.generate(list(prompts), SamplingParams(**params))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("penalty", [0.8, 1.3])
def test_the_repetition_penalty_generates_what_transformers_does(folder: Path, llm: LLM, penalty: float) -> None:
    model = reference_model(folder)
    model.generation_config.eos_token_id = None
    for prompt in random_prompts(LENGTHS):
        expected = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            repetition_penalty=penalty,
            pad_token_id=0,
        )
        assert tokens(generate(llm, prompt, repetition_penalty=penalty)) == [expected[0, len(prompt) :].tolist()]


def test_a_presence_penalty_of_many_rows_forbids_repeating(llm: LLM) -> None:
    prompts = random_prompts(LENGTHS)
    plain = tokens(generate(llm, *prompts))
    biased = tokens(generate(llm, *prompts, frequency_penalty=2.0, presence_penalty=2.0))
    assert biased != plain
    assert sum(len(set(row)) for row in biased) > sum(len(set(row)) for row in plain)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.4}])
def test_log_probabilities_are_those_of_the_reference(folder: Path, llm: LLM, params: dict[str, Any]) -> None:
    (prompt,) = random_prompts([21])
    (output,) = generate(llm, prompt, logprobs=4, **params)
    (choice,) = output.outputs
    assert choice.logprobs is not None
    with torch.no_grad():
        logits = reference_model(folder)(torch.tensor([[*prompt, *choice.token_ids]])).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    for reported, wanted, token_id in zip(choice.logprobs, expected, choice.token_ids, strict=True):
        best = wanted.topk(4).indices.tolist()
        assert list(reported) == list(dict.fromkeys([token_id, *best]))
        for candidate, logprob in reported.items():
            assert logprob.logprob == pytest.approx(wanted[candidate].item(), abs=2e-4)
            assert logprob.rank == (wanted > wanted[candidate]).sum().item() + 1
            assert logprob.decoded_token == tokenizer.decode([candidate], skip_special_tokens=False)
    total = sum(
        reported[token_id].logprob for reported, token_id in zip(choice.logprobs, choice.token_ids, strict=True)
    )
    assert choice.cumulative_logprob == pytest.approx(total)


def test_more_log_probabilities_than_allowed_are_refused(folder: Path, llm: LLM) -> None:
    for given in (21, -1):
        with pytest.raises(InvalidRequest, match=f"logprobs: given {given}, expected at most 20"):
            generate(llm, [1], logprobs=given)
    (output,) = generate(make_llm(folder, max_logprobs=-1), [5, 6], logprobs=-1, max_tokens=1)
    assert output.outputs[0].logprobs is not None
    (reported,) = output.outputs[0].logprobs
    assert len(reported) == VOCAB_SIZE
    assert sum(math.exp(each.logprob) for each in reported.values()) == pytest.approx(1.0, abs=1e-4)


def test_a_bias_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=f"logit_bias: given token {VOCAB_SIZE}, expected 0 to {VOCAB_SIZE - 1}"):
        generate(llm, [1], logit_bias={3: 1.0, VOCAB_SIZE: 1.0})


def test_bad_words_are_not_generated(llm: LLM) -> None:
    prompts = random_prompts(LENGTHS)
    for params in ({}, {"temperature": 1.0, "seed": 5}):
        plain = tokens(generate(llm, *prompts, **params))
        pairs = [row[index : index + 2] for row in plain for index in (0, 3, 7)]
        without = tokens(generate(llm, *prompts, bad_words_token_ids=[*pairs, [plain[0][5]]], **params))
        made = [row[index : index + 2] for row in without for index in range(NUM_TOKENS - 1)]
        assert not [pair for pair in pairs if pair in made]
        assert plain[0][5] not in {token for row in without for token in row}


def test_bad_words_are_banned_by_their_text(llm: LLM) -> None:
    prompts = random_prompts(LENGTHS)
    plain = tokens(generate(llm, *prompts))
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    words = {token: tokenizer.decode([token]) for row in plain for token in row}
    spelled = {token: word for token, word in words.items() if tokenizer.encode(word).ids == [token]}
    banned = list(spelled)[:3]
    assert len(banned) == 3
    after = tokens(generate(llm, *prompts, bad_words=[spelled[token] for token in banned]))
    assert not {token for row in after for token in row} & set(banned)


def test_only_allowed_tokens_are_generated(llm: LLM) -> None:
    prompts = random_prompts(LENGTHS)
    outputs = generate(llm, *prompts, allowed_token_ids=[7, 30, 31], temperature=1.0, seed=1)
    assert {token for row in tokens(outputs) for token in row} == {7, 30, 31}


def test_a_request_that_allows_nothing_fails_alone(folder: Path) -> None:
    engine = Engine(folder, EngineConfig.from_options({"device": "cpu", "num_gpu_blocks_override": 64}))
    (prompt,) = random_prompts([9])
    end = next(iter(engine.eos_token_ids))
    engine.add_request("good", prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.add_request("bad", prompt, SamplingParams(allowed_token_ids=[end], min_tokens=2))
    finishes = {output.seq_id: output for output in run(engine) if output.finish_reason is not None}
    assert finishes["good"].finish_reason == "length"
    assert finishes["bad"].finish_reason == "error"
    assert "no token may be chosen" in str(finishes["bad"].error)


def test_the_best_of_several_are_returned(llm: LLM) -> None:
    (prompt,) = random_prompts([9])
    params: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    (wide,) = generate(llm, prompt, n=5, logprobs=0, **params)
    (best,) = generate(llm, prompt, n=2, best_of=5, **params)
    ordered = sorted(wide.outputs, key=lambda choice: -(choice.cumulative_logprob or 0.0))
    assert [choice.token_ids for choice in best.outputs] == [choice.token_ids for choice in ordered[:2]]
    assert [choice.index for choice in best.outputs] == [0, 1]
    assert [choice.logprobs for choice in best.outputs] == [None, None]
    assert best.finished


def test_preemption_changes_nothing(folder: Path, llm: LLM) -> None:
    prompts = random_prompts(LENGTHS)
    calm = generate(llm, *prompts, seed=1, **EVERYTHING)
    tight = make_llm(folder, num_gpu_blocks_override=11, block_size=8, max_num_batched_tokens=23)
    disturbed = generate(tight, *prompts, seed=1, **EVERYTHING)
    assert tight.engine.stats().num_preemptions > 0
    assert tokens(disturbed) == tokens(calm)
    assert [ranks(output) for output in disturbed] == [ranks(output) for output in calm]


def ranks(output: RequestOutput) -> list[list[tuple[int, int, str]]]:
    reported = output.outputs[0].logprobs
    assert reported is not None
    return [[(token_id, each.rank, each.decoded_token) for token_id, each in step.items()] for step in reported]


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_resumed_request_goes_on_with_its_counts(folder: Path, cut: int) -> None:
    params = SamplingParams(seed=4, ignore_eos=True, **EVERYTHING)
    (prompt,) = random_prompts([20])
    config = EngineConfig.from_options({"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 32})
    first, second = Engine(folder, config), Engine(folder, config)
    first.add_request("a", prompt, params)
    whole = run(first)
    second.add_request("a", prompt, params, output_token_ids=[output.token_id or 0 for output in whole[:cut]])
    rest = run(second)
    assert [output.token_id for output in rest] == [output.token_id for output in whole[cut:]]
    for got, wanted in zip(rest, whole[cut:], strict=True):
        assert got.logprobs is not None
        assert wanted.logprobs is not None
        assert [(t.token_id, t.rank, t.text) for t in got.logprobs] == [
            (t.token_id, t.rank, t.text) for t in wanted.logprobs
        ]
        assert [t.logprob for t in got.logprobs] == pytest.approx([t.logprob for t in wanted.logprobs], abs=1e-4)


def run(engine: Engine) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs
