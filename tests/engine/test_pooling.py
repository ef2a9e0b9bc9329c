"""Vectors of prompts are the hidden states of `transformers`, wherever chunks, preemptions and cached prefixes fall."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import (
    LLM,
    EmbeddingRequestOutput,
    InvalidRequest,
    LoRARequest,
    ModelFileError,
    SamplingParams,
    WeightsError,
)
from support.engines.architectures import small_config, write_model
from support.engines.lora_adapters import make_adapter, merged_model
from support.engines.tiny_models import make_classifier, make_model, random_prompts, reference_model

pytestmark = [pytest.mark.served, pytest.mark.usefixtures("ranks")]


LENGTHS = [1, 2, 9, 23, 38]
TOLERANCE = 1e-4
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
MODES = {
    "last": "pooling_mode_lasttoken",
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
}


@pytest.fixture
def asking(model_of: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """Return a copy of a tiny model, whose files a test changes."""
    return lambda name: Path(shutil.copytree(model_of(name), tmp_path / name))


def vector_of(pooled: bytes | None) -> torch.Tensor:
    assert pooled is not None
    return torch.frombuffer(bytearray(pooled), dtype=torch.float32)


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(
        folder, **{"dtype": "float32", "device": "cpu", "block_size": 4, "num_gpu_blocks_override": 64, **options}
    )


def ask_for(folder: Path, kind: str, *modules: dict[str, Any]) -> None:
    """Let a model's files ask for a kind of pooling, as sentence-transformers writes them."""
    (folder / "modules.json").write_text(json.dumps([*MODULES, *modules]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    asked = {
        mode: mode == MODES.get(kind, "pooling_mode_max_tokens")
        for mode in (*MODES.values(), "pooling_mode_max_tokens")
    }
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **asked}))


@cache
def last_states(folder: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    """Return the reference's last hidden states: (tokens, hidden_size)."""
    with torch.inference_mode():
        output = reference_model(folder)(torch.tensor([prompt]), output_hidden_states=True)
    states: torch.Tensor = output.hidden_states[-1][0]
    return states


def expected(folder: Path, prompt: list[int], kind: str) -> torch.Tensor:
    """Pool the reference's last hidden states by hand."""
    states = last_states(folder, tuple(prompt))
    return {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[kind]


def check(outputs: list[EmbeddingRequestOutput], folder: Path, kind: str, *, normalize: bool) -> None:
    for output in outputs:
        vector = expected(folder, output.prompt_token_ids, kind)
        if normalize:
            vector = vector / vector.norm()
        torch.testing.assert_close(torch.tensor(output.embedding), vector, atol=TOLERANCE, rtol=0.0)


IN_CHUNKS = {"max_num_batched_tokens": 7, "max_num_seqs": 4}
PREEMPTING = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "num_gpu_blocks_override": 30, "async_scheduling": True}


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("llama", "last", IN_CHUNKS),
        ("gemma2", "last", PREEMPTING),
        ("gemma2", "mean", IN_CHUNKS),
        ("llama", "mean", PREEMPTING),
        ("llama", "cls", IN_CHUNKS),
        ("gemma2", "cls", PREEMPTING),
    ],
)
def test_they_are_those_of_transformers(
    asking: Callable[[str], Path], name: str, kind: str, options: dict[str, Any]
) -> None:
    folder = asking(name)
    ask_for(folder, kind)
    llm = make_llm(folder, **options)
    prompts = random_prompts(LENGTHS)
    for turn in range(2):
        outputs = llm.embed(prompts)
        llm.engine.check_invariants()
        check(outputs, folder, kind, normalize=False)
        has_room = "num_gpu_blocks_override" not in options  # else blocks may be evicted between the turns
        if has_room or kind != "last":
            assert any(output.num_cached_tokens for output in outputs) == (kind == "last" and turn == 1)
    assert llm.engine.stats().num_generated_tokens == 0


def test_they_come_beside_texts_and_log_probabilities(llama: Path) -> None:
    """In the same steps as decodes and log probabilities of prompts, with drafts, and with two steps in flight."""
    prompts = random_prompts(LENGTHS)
    texts = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    params = [texts if index % 2 else SamplingParams(max_tokens=0, pooling="mean") for index in range(len(prompts))]
    alone = make_llm(llama).generate(prompts, texts, use_tqdm=False)
    for options in ({"speculative_method": "ngram", "num_speculative_tokens": 3}, {"async_scheduling": True}):
        llm = make_llm(llama, max_num_batched_tokens=8, max_num_seqs=4, **options)
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        finally:
            llm.engine.close()
        for index, output in enumerate(outputs):
            if index % 2:
                assert output.outputs[0].token_ids == alone[index].outputs[0].token_ids
                assert len(output.prompt_logprobs or ()) == len(prompts[index])
                continue
            assert output.pooled is not None
            assert output.outputs[0].token_ids == []
            got = vector_of(output.pooled)
            torch.testing.assert_close(got, expected(llama, prompts[index], "mean"), atol=TOLERANCE, rtol=0.0)


def test_a_preempted_prompt_is_pooled_from_its_beginning(llama: Path) -> None:
    """Decodes beside a long prompt, of which a step has one token, take the blocks that it was promised."""
    llm = make_llm(llama, max_num_batched_tokens=3, max_num_seqs=3, num_gpu_blocks_override=16)
    texts = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [random_prompts(LENGTHS)[index] for index in (1, 2, 4)]
    outputs = llm.generate(prompts, [texts, texts, SamplingParams(max_tokens=0, pooling="mean")], use_tqdm=False)
    assert llm.engine.stats().num_preemptions
    assert outputs[2].pooled is not None
    got = vector_of(outputs[2].pooled)
    torch.testing.assert_close(got, expected(llama, prompts[2], "mean"), atol=TOLERANCE, rtol=0.0)


def test_adapters_and_int8_weights_change_them(llama: Path, tmp_path: Path) -> None:
    """In one batch with texts, in a pool that preempts, and again from the prefix cache, which adapters don't share."""
    small = {"max_num_batched_tokens": 6, "max_num_seqs": 4, "num_gpu_blocks_override": 20, "deterministic": True}
    adapter = make_adapter(llama, tmp_path / "adapter", seed=1)
    named = LoRARequest("adapter", 1, str(adapter))
    prompts = random_prompts([23, 9]) * 2 + random_prompts([5, 7])
    adapters = [named, named, None, None, named, None]
    vectors = [SamplingParams(max_tokens=0, temperature=0.0, pooling=kind) for kind in ("mean", "last")]
    texts = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    params = [*vectors, *vectors, texts, texts]
    with torch.inference_mode():
        merged = merged_model(llama, adapter)
        adapted = [merged(torch.tensor([each]), output_hidden_states=True).hidden_states[-1][0] for each in prompts[:2]]
    wanted = [
        adapted[0].mean(0),
        adapted[1][-1],
        *(expected(llama, prompts[at], ("mean", "last")[at]) for at in (0, 1)),
    ]
    for quantization, roomy in ((None, None), ("int8", make_llm(llama, enable_lora=True, quantization="int8"))):
        llm = make_llm(llama, enable_lora=True, quantization=quantization, **small)
        if roomy is not None:
            alone = [
                roomy.generate([prompt], each, use_tqdm=False, lora_request=asked)[0]
                for prompt, each, asked in zip(prompts, params[:4], adapters, strict=False)
            ]
            states = [vector_of(output.pooled) for output in alone]
            assert all(
                0.0 < (one - other).norm() < 0.1 * other.norm() for one, other in zip(states, wanted, strict=True)
            )
            wanted = states
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
            for output, vector in zip(outputs, wanted, strict=False):
                got = vector_of(output.pooled)
                torch.testing.assert_close(got, vector, atol=TOLERANCE, rtol=0.0)
        assert llm.engine.stats().num_preemptions > 0
        if roomy is None:
            # The blocks of a prompt with an adapter serve that adapter alone.
            turns = [(named, adapted[0]), (named, adapted[0]), (None, last_states(llama, tuple(prompts[0])))]
            num_cached = []
            for adapter_of, states_of in turns:
                (output,) = llm.generate(prompts[:1], vectors[1], use_tqdm=False, lora_request=adapter_of)
                got = vector_of(output.pooled)
                torch.testing.assert_close(got, states_of[-1], atol=TOLERANCE, rtol=0.0)
                num_cached.append(output.num_cached_tokens)
            assert num_cached[1] > 0


def test_a_prompt_can_be_all_that_is_computed(llama: Path) -> None:
    prompts = random_prompts(LENGTHS)
    asked = {"temperature": 0.0, "prompt_logprobs": 1}
    llm = make_llm(llama, max_num_batched_tokens=7, max_num_seqs=4)
    outputs = llm.generate(prompts, SamplingParams(**asked, max_tokens=0), use_tqdm=False)
    with_token = make_llm(llama, max_num_batched_tokens=7, max_num_seqs=4).generate(
        prompts, SamplingParams(**asked, max_tokens=1), use_tqdm=False
    )
    assert [output.prompt_logprobs for output in outputs] == [output.prompt_logprobs for output in with_token]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert [output.outputs[0].token_ids for output in outputs] == [[]] * len(prompts)


def test_files_say_how_vectors_are_made(asking: Callable[[str], Path]) -> None:
    folder = asking("llama")
    prompts = random_prompts([5])
    check(make_llm(folder).embed(prompts), folder, "last", normalize=True)
    with pytest.raises(InvalidRequest, match="dimensions"):
        make_llm(folder).embed(prompts, dimensions=8)
    ask_for(folder, "mean", NORMALIZE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [8, 16]}))
    llm = make_llm(folder)
    check(llm.embed(prompts), folder, "mean", normalize=True)
    (cut,) = llm.embed(prompts, dimensions=8)
    first = expected(folder, prompts[0], "mean")[:8]
    torch.testing.assert_close(torch.tensor(cut.embedding), first / first.norm(), atol=TOLERANCE, rtol=0.0)
    with pytest.raises(InvalidRequest, match="dimensions"):
        llm.embed(prompts, dimensions=9)
    ask_for(folder, "max")
    with pytest.raises(InvalidRequest, match="1_Pooling asks for max_tokens"):
        llm.embed(prompts)
    ask_for(folder, "last", {"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    with pytest.raises(InvalidRequest, match="module 'Dense'"):
        llm.embed(prompts)


@pytest.mark.parametrize(("is_tied", "is_named_by_its_head"), [(False, False), (False, True), (True, True)])
def test_a_folder_without_a_head_gives_vectors(tmp_path: Path, *, is_tied: bool, is_named_by_its_head: bool) -> None:
    """As `AutoModel` saves it, whose tensors' names have no prefix; some are published with the name of the whole."""
    whole = make_model(tmp_path / "whole", "qwen3", tie_word_embeddings=is_tied)
    from transformers import AutoModel  # takes a second

    base = AutoModel.from_pretrained(whole)
    base.save_pretrained(tmp_path / "base")
    config_file = tmp_path / "base" / "config.json"
    config = json.loads(config_file.read_text())
    assert config["architectures"] == ["Qwen3Model"]
    if is_named_by_its_head:
        config_file.write_text(json.dumps({**config, "architectures": ["Qwen3ForCausalLM"]}))
        if not is_tied:
            with pytest.raises(WeightsError, match=r"lm_head\.weight"):
                make_llm(tmp_path / "base")
            return
    llm = make_llm(tmp_path / "base", max_num_batched_tokens=7, max_num_seqs=4)
    check(llm.embed(random_prompts(LENGTHS)), whole, "last", normalize=True)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    if is_tied:
        prompts = random_prompts([5])
        (got,), (wanted,) = (each.generate(prompts, params, use_tqdm=False) for each in (llm, make_llm(whole)))
        assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
        return
    with pytest.raises(InvalidRequest, match="has no head"):
        llm.generate(random_prompts([5]), params, use_tqdm=False)


def test_a_model_of_other_code_gives_none(tmp_path: Path) -> None:
    config = small_config("gpt2")
    config.save_pretrained(tmp_path)
    write_model(tmp_path, config)
    with pytest.raises(InvalidRequest, match="pooling: given 'last'"):
        make_llm(tmp_path).embed(random_prompts([3], vocab_size=40))


OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 32, "block_size": 4}
PROMPTS = random_prompts([1, 9, 23, 30])


def scores(folder: Path) -> torch.Tensor:
    """Return the reference's scores: (prompts, labels)."""
    from transformers import AutoModelForSequenceClassification  # takes a second

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])


def probabilities(llm: LLM) -> torch.Tensor:
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
        torch.testing.assert_close(probabilities(llm), expected, atol=TOLERANCE, rtol=TOLERANCE)
        with pytest.raises(InvalidRequest, match="scores of labels and no vectors"):
            llm.embed([{"prompt_token_ids": PROMPTS[0]}])
        with pytest.raises(InvalidRequest, match="has no head"):
            llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(max_tokens=1))
    finally:
        llm.engine.close()


def test_labels_that_are_refused(tmp_path: Path) -> None:
    plain = LLM(make_model(tmp_path / "plain", "llama"), **OPTIONS)
    with pytest.raises(InvalidRequest, match="a model without labels"):
        plain.classify("text")
    folder = make_classifier(tmp_path / "model", "llama", 2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"1": "a"}}))
    with pytest.raises(ModelFileError, match="id2label"):
        LLM(folder, **OPTIONS)
