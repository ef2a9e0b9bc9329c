"""Log probabilities, penalties, bias and banned words are those of `transformers`, for outputs and prompts, wherever
chunks, preemptions and cached prefixes fall."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, Engine, EngineConfig, InvalidRequest, RequestOutput, SamplingParams, SequenceOutput
from pagestream_engine.plan import ScheduledStep
from support.engines.architectures import small_config, write_model
from support.engines.tiny_models import VOCAB_SIZE, random_prompts, reference_model

pytestmark = pytest.mark.served

PARAMS = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
LENGTHS = [1, 2, 9, 23, 38]
TOLERANCE = 2e-3
"""Of log probabilities, in float32."""


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder, **{"dtype": "float32", "device": "cpu", "block_size": 4, "num_gpu_blocks_override": 64, **options}
    )


def check(outputs: list[RequestOutput], folder: Path, count: int) -> None:
    """Compare each prompt token with the reference's log softmax."""
    model = reference_model(folder)
    for output in outputs:
        prompt = output.prompt_token_ids
        assert output.prompt_logprobs is not None
        first, *rest = output.prompt_logprobs
        assert first is None
        assert len(rest) == len(prompt) - 1
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        for token_id, row, logprobs in zip(prompt[1:], rest, expected, strict=False):
            assert row is not None
            assert next(iter(row)) == token_id
            assert row[token_id].logprob == pytest.approx(logprobs[token_id].item(), abs=TOLERANCE)
            assert abs(row[token_id].rank - 1 - int((logprobs > logprobs[token_id]).sum())) <= 1
            likeliest = sorted((each.logprob for each in row.values()), reverse=True)[:count]
            torch.testing.assert_close(torch.tensor(likeliest), logprobs.topk(count).values, atol=TOLERANCE, rtol=0.0)


IN_CHUNKS = {"max_num_batched_tokens": 7, "max_num_seqs": 4}
PREEMPTING = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "num_gpu_blocks_override": 30, "async_scheduling": True}


@pytest.mark.parametrize(("name", "options"), [("llama", IN_CHUNKS), ("gemma2", PREEMPTING), ("gpt2", IN_CHUNKS)])
def test_those_of_prompts_are_those_of_transformers(
    name: str, options: dict[str, Any], model_of: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path
    if name == "gpt2":  # which has no family
        config = small_config("gpt2")
        config.save_pretrained(folder)
        write_model(folder, config)
    else:
        folder = model_of(name)
    llm = make_llm(folder, **options)
    prompts = random_prompts(LENGTHS, vocab_size=min(VOCAB_SIZE, llm.engine.vocab_size))
    params = SamplingParams(**PARAMS, prompt_logprobs=2)
    for _ in range(2):  # The second pass would find cached prefixes.
        outputs = llm.generate(prompts, params, use_tqdm=False)
        llm.engine.check_invariants()
        check(outputs, folder, 2)
        assert {output.num_cached_tokens for output in outputs} == {0}
    without = llm.generate(prompts, SamplingParams(**PARAMS), use_tqdm=False)
    assert [output.prompt_logprobs for output in without] == [None] * len(prompts)
    assert [each.outputs[0].token_ids for each in without] == [each.outputs[0].token_ids for each in outputs]


@pytest.fixture(scope="module")
def whole(llama: Path) -> list[RequestOutput]:
    """Of prompts that are computed in one step."""
    params = SamplingParams(**PARAMS, prompt_logprobs=2)
    return make_llm(llama).generate(random_prompts(LENGTHS), params, use_tqdm=False)


def tokens_and_ranks(output: RequestOutput) -> list[list[tuple[int, int]]]:
    rows = output.prompt_logprobs or []
    return [[(token_id, each.rank) for token_id, each in row.items()] for row in rows if row is not None]


@pytest.mark.parametrize(("budget", "num_blocks", "ahead"), [(3, 40, False), (17, 12, True), (40, 20, False)])
def test_chunks_and_preemptions_change_nothing(
    llama: Path, whole: list[RequestOutput], budget: int, num_blocks: int, ahead: bool
) -> None:
    llm = make_llm(
        llama,
        max_num_batched_tokens=budget,
        max_num_seqs=3,
        num_gpu_blocks_override=num_blocks,
        async_scheduling=ahead,
        deterministic=True,
    )
    outputs = llm.generate(random_prompts(LENGTHS), SamplingParams(**PARAMS, prompt_logprobs=2), use_tqdm=False)
    assert list(map(tokens_and_ranks, outputs)) == list(map(tokens_and_ranks, whole))


class CutPrompts:
    """Notes, as `Engine.on_schedule`, each computation of a prompt that a preemption has ended before the prompt's."""

    def __init__(self) -> None:
        self.tokens_lost: list[int] = []
        """Prompt tokens that each of them had computed."""
        self._computed: dict[str, int] = {}

    def __call__(self, step: ScheduledStep) -> None:
        for chunk in step.prefills:
            seq = chunk.seq
            begin, before = seq.num_sent_tokens, self._computed.get(seq.seq_id, 0)
            if begin < before < seq.num_prompt_tokens:
                self.tokens_lost.append(before - begin)
            self._computed[seq.seq_id] = begin + chunk.num_scheduled_tokens


@pytest.mark.parametrize("ahead", [False, True])
def test_a_preemption_within_a_prompt_changes_nothing(llama: Path, whole: list[RequestOutput], ahead: bool) -> None:
    """Two sequences decode beside a long prompt, of which a step has one token, and take the blocks it was promised."""
    llm = make_llm(
        llama,
        max_num_batched_tokens=3,
        max_num_seqs=3,
        num_gpu_blocks_override=16,
        async_scheduling=ahead,
        deterministic=True,
    )
    cut = llm.engine.on_schedule = CutPrompts()
    chosen = [1, 2, 4]
    params = [SamplingParams(**{**PARAMS, "max_tokens": count}, prompt_logprobs=2) for count in (40, 40, 2)]
    outputs = llm.generate([random_prompts(LENGTHS)[index] for index in chosen], params, use_tqdm=False)
    assert cut.tokens_lost, "no prompt was preempted before its end"
    assert llm.engine.stats().num_preemptions >= len(cut.tokens_lost)
    assert list(map(tokens_and_ranks, outputs)) == [tokens_and_ranks(whole[index]) for index in chosen]


def test_a_group_computes_them_once(llama: Path, whole: list[RequestOutput]) -> None:
    llm = make_llm(llama)
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    (output,) = llm.generate([random_prompts(LENGTHS)[3]], params, use_tqdm=False)
    assert tokens_and_ranks(output) == tokens_and_ranks(whole[3])
    assert llm.engine.stats().num_prompt_tokens == LENGTHS[3]


def test_how_many_are_given(llama: Path) -> None:
    prompt = [5, 9, 11]
    with pytest.raises(InvalidRequest, match="prompt_logprobs: given 21, expected at most 20"):
        make_llm(llama).generate([prompt], SamplingParams(prompt_logprobs=21), use_tqdm=False)
    llm = make_llm(llama, max_logprobs=-1)
    for asked, expected in ((0, 1), (-1, llm.engine.vocab_size)):
        (output,) = llm.generate([prompt], SamplingParams(**PARAMS, prompt_logprobs=asked), use_tqdm=False)
        assert output.prompt_logprobs is not None
        assert [len(row) for row in output.prompt_logprobs if row is not None] == [expected] * 2


NUM_TOKENS = 24
OUTPUT_LENGTHS = [3, 17, 40, 16]
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
def llm(llama: Path) -> LLM:
    return make_llm(llama, block_size=16, num_gpu_blocks_override=128)


def generate(llm: LLM, *prompts: list[int], **params: Any) -> list[RequestOutput]:
    params = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **params}
    return llm.generate(list(prompts), SamplingParams(**params))


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [choice.token_ids for output in outputs for choice in output.outputs]


def test_the_repetition_penalty_generates_what_transformers_does(llama: Path, llm: LLM) -> None:
    model = reference_model(llama)
    model.generation_config.eos_token_id = None
    for prompt, penalty in zip(random_prompts(OUTPUT_LENGTHS), (0.8, 1.3, 0.8, 1.3), strict=True):
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
    prompts = random_prompts(OUTPUT_LENGTHS)
    plain = tokens(generate(llm, *prompts))
    biased = tokens(generate(llm, *prompts, frequency_penalty=2.0, presence_penalty=2.0))
    assert biased != plain
    assert sum(len(set(row)) for row in biased) > sum(len(set(row)) for row in plain)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.4}])
def test_log_probabilities_are_those_of_the_reference(llama: Path, llm: LLM, params: dict[str, Any]) -> None:
    (prompt,) = random_prompts([21])
    (output,) = generate(llm, prompt, logprobs=4, **params)
    (choice,) = output.outputs
    assert choice.logprobs is not None
    with torch.no_grad():
        logits = reference_model(llama)(torch.tensor([[*prompt, *choice.token_ids]])).logits[0]
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


def test_more_log_probabilities_than_allowed_are_refused(llama: Path, llm: LLM) -> None:
    for given in (21, -1):
        with pytest.raises(InvalidRequest, match=f"logprobs: given {given}, expected at most 20"):
            generate(llm, [1], logprobs=given)
    (output,) = generate(make_llm(llama, max_logprobs=-1), [5, 6], logprobs=-1, max_tokens=1)
    assert output.outputs[0].logprobs is not None
    (reported,) = output.outputs[0].logprobs
    assert len(reported) == VOCAB_SIZE
    assert sum(math.exp(each.logprob) for each in reported.values()) == pytest.approx(1.0, abs=1e-4)


def test_a_bias_outside_the_vocabulary_is_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=f"logit_bias: given token {VOCAB_SIZE}, expected 0 to {VOCAB_SIZE - 1}"):
        generate(llm, [1], logit_bias={3: 1.0, VOCAB_SIZE: 1.0})


def test_bad_words_are_not_generated(llm: LLM) -> None:
    prompts = random_prompts(OUTPUT_LENGTHS)
    for params in ({}, {"temperature": 1.0, "seed": 5}):
        plain = tokens(generate(llm, *prompts, **params))
        pairs = [row[index : index + 2] for row in plain for index in (0, 3, 7)]
        without = tokens(generate(llm, *prompts, bad_words_token_ids=[*pairs, [plain[0][5]]], **params))
        made = [row[index : index + 2] for row in without for index in range(NUM_TOKENS - 1)]
        assert not [pair for pair in pairs if pair in made]
        assert plain[0][5] not in {token for row in without for token in row}


def test_bad_words_are_banned_by_their_text(llm: LLM) -> None:
    prompts = random_prompts(OUTPUT_LENGTHS)
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
    prompts = random_prompts(OUTPUT_LENGTHS)
    outputs = generate(llm, *prompts, allowed_token_ids=[7, 30, 31], temperature=1.0, seed=1)
    assert {token for row in tokens(outputs) for token in row} == {7, 30, 31}


def test_a_request_that_allows_nothing_fails_alone(llama: Path) -> None:
    engine = Engine(llama, EngineConfig.from_options({"device": "cpu", "num_gpu_blocks_override": 64}))
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


def test_preemption_changes_nothing(llama: Path, llm: LLM) -> None:
    prompts = random_prompts(OUTPUT_LENGTHS)
    calm = generate(llm, *prompts, seed=1, **EVERYTHING)
    tight = make_llm(llama, num_gpu_blocks_override=11, block_size=8, max_num_batched_tokens=23)
    disturbed = generate(tight, *prompts, seed=1, **EVERYTHING)
    assert tight.engine.stats().num_preemptions > 0
    assert tokens(disturbed) == tokens(calm)
    assert [ranks(output) for output in disturbed] == [ranks(output) for output in calm]


def ranks(output: RequestOutput) -> list[list[tuple[int, int, str]]]:
    reported = output.outputs[0].logprobs
    assert reported is not None
    return [[(token_id, each.rank, each.decoded_token) for token_id, each in step.items()] for step in reported]


@pytest.mark.parametrize("cut", [1, 20])
def test_a_resumed_request_goes_on_with_its_counts(llama: Path, cut: int) -> None:
    params = SamplingParams(seed=4, ignore_eos=True, **EVERYTHING)
    (prompt,) = random_prompts([20])
    config = EngineConfig.from_options({"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 32})
    first, second = Engine(llama, config), Engine(llama, config)
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


def run(engine: Engine) -> list[SequenceOutput]:
    outputs: list[SequenceOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs
