"""Log probabilities of prompts are those of `transformers`, wherever chunks, preemptions and cached prefixes fall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.request.outputs import RequestOutput
from pagestream_engine.scheduler.scheduled_step import ScheduledStep
from support.engines.architectures import small_config, write_model
from support.engines.tiny_models import VOCAB_SIZE, make_model, random_prompts, reference_model

PARAMS = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
LENGTHS = [1, 2, 9, 23, 38]
TOLERANCE = 2e-3
"""Of log probabilities, in float32."""


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / request.param
    if request.param != "gpt2":
        return make_model(path, request.param)
    config = small_config("gpt2")
    config.save_pretrained(path)
    write_model(path, config)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", "llama")


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


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4, "num_gpu_blocks_override": 30, "async_scheduling": True},
    ],
)
def test_they_are_those_of_transformers(folder: Path, options: dict[str, Any]) -> None:
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


@settings(max_examples=8, deadline=None)
@given(budget=st.integers(3, 40), num_blocks=st.integers(12, 40), ahead=st.booleans())
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


def test_an_executor_process_sends_them(llama: Path, whole: list[RequestOutput]) -> None:
    llm = make_llm(llama, executor="process", max_num_batched_tokens=8, max_num_seqs=4)
    try:
        outputs = llm.generate(random_prompts(LENGTHS), SamplingParams(**PARAMS, prompt_logprobs=2), use_tqdm=False)
    finally:
        llm.engine.close()
    assert list(map(tokens_and_ranks, outputs)) == list(map(tokens_and_ranks, whole))


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
