"""Greedy tokens equal those of `transformers` in float32, whatever the scheduler does to the batch.

Where the reference's best two logits are closer than `TIE`, the second is accepted, too. `make families` compares every
architecture that `transformers` registers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, ConfigError, RequestOutput, SamplingParams
from support.engines.architectures import nested_config, small_config, write_model
from support.engines.general_parity import check_parity, references
from support.engines.general_parity import mixed_prompts as general_prompts
from support.engines.tiny_models import make_model, random_prompts, reference_model

pytestmark = pytest.mark.served

DEMO = Path(__file__).parents[2] / "deploy" / "demo-model" / "model"
NUM_TOKENS = 32
TIE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
BLOCK_SIZE = 8
LENGTHS = [2, 5, 16, 17, 30, 100]
WINDOWED = {"qwen2-window", "qwen3-window", "mistral", "mixtral", "qwen3-moe", "gemma2", "gemma3", "phi3", "gpt-neo"}
LAYER_NORMED = {
    *("gptj", "codegen", "bloom", "bloom-normed", "mpt", "falcon", "falcon-new", "falcon-rw"),
    *("xglm", "biogpt", "gpt-neox-japanese", "stablelm", "stablelm-parallel"),
}
COMMON = ["llama", "qwen3-window", "gemma3", "mixtral", "qwen3-moe", "bloom", "falcon", "stablelm"]
RARE = sorted({*WINDOWED, *LAYER_NORMED, "demo"} - {*COMMON})
FAMILIES = [*COMMON, *(pytest.param(name, marks=pytest.mark.slow) for name in RARE)]
GENERAL = {
    "gpt_oss": "sinks, windows, experts",
    "gpt2": "learned positions, one projection for query, key and value",
    "cohere2": "a window in some layers, interleaved rotation, parallel attention and MLP",
    "deepseek_v2": "latent attention: values smaller than keys",
    "mimo_v2_flash": "layers with different numbers of KV heads",
    "vaultgemma": "soft caps",
    "granite": "norms that the engine computes",
    "diffllama": "two calls of attention in a layer",
    "roberta": "an encoder's code as a decoder, all logits",
}
"""Architectures without a family, which differ in what the probe has to find out."""
NESTED = {
    "gemma3": "windows, a nested configuration without what its class has as defaults",
    "mistral3": "names that begin with language_model",
    "qwen2_5_vl": "a rotation of three axes, names without a prefix beside those of the part that sees",
    "qwen3_vl_moe": "its own code, experts in one tensor",
    **dict.fromkeys(("cohere2_vision", "gemma4", "glm4v", "llama4", "mllama"), "its own code"),
    **dict.fromkeys(
        (
            "deepseek_vl",
            "got_ocr2",
            "idefics3",
            "internvl",
            "llava",
            "llava_onevision",
            "qwen2_vl",
            "qwen3_vl",
            "smolvlm",
        ),
        "a family",
    ),
}
"""Models of images and text, whose language model runs."""
GENERAL_CHANGES = {"cohere2": {"layer_types": ["sliding_attention", "full_attention"]}}


def _mostly_slow(names: Sequence[str], quick: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mixed_prompts() -> list[list[int]]:
    """Prompts below and above any window, two of which share a beginning."""
    prefix, *tails = random_prompts([40, 3, 30], seed=1)
    return [*random_prompts(LENGTHS), *(prefix + tail for tail in tails)]


def demo_prompts() -> list[list[int]]:
    """Questions of the demo model's own world, as its chat template puts them, and a text."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    questions = json.loads((DEMO / "questions.json").read_text())["held_out"]
    texts = [
        tokenizer.apply_chat_template(question["messages"], tokenize=False, add_generation_prompt=True)
        for question in questions[:: len(questions) // 4][:4]
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in (*texts, "Once upon a time")]


def check_greedy(model: Any, prompts: list[list[int]], outputs: list[RequestOutput]) -> None:
    """Each token is the reference's own choice after the tokens before it, so that all are what it would generate."""
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        token_ids = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = (
                model(torch.tensor([prompt + token_ids[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :].float()
            )
        gaps = logits.max(dim=-1).values - logits[range(len(token_ids)), token_ids]
        worst = int(gaps.argmax())
        assert gaps[worst] <= TIE, f"prompt {index}, token {worst}: the reference prefers its own by {gaps[worst]}"


def generate(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    outputs = llm.generate(prompts, GREEDY)
    llm.engine.check_invariants()
    stats = llm.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    return outputs


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, model_of: Callable[..., Path]) -> None:
    """In small chunks, on cached prefixes, and in a pool so small that it preempts."""
    folder, prompts = (DEMO, demo_prompts()) if name == "demo" else (model_of(name), mixed_prompts())
    model = reference_model(folder)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE}

    llm = LLM(folder, **options, num_gpu_blocks_override=512, max_num_batched_tokens=7, max_num_seqs=5)
    check_greedy(model, prompts, generate(llm, prompts))
    stats = llm.engine.stats()
    computed = stats.num_prompt_tokens + stats.num_generated_tokens - len(prompts)
    assert stats.num_steps >= computed / 7
    again = generate(llm, prompts)
    check_greedy(model, prompts, again)
    assert [output.num_cached_tokens for output in again] == [
        (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts
    ]
    windows = [group.spec.window for group in llm.engine.kv_layout.groups]
    assert any(window is not None and window < max(LENGTHS) for window in windows) == (name in WINDOWED)

    longest = max(map(len, prompts)) + NUM_TOKENS
    num_blocks = llm.engine.kv_layout.num_blocks_for(longest) + 2
    tight = LLM(folder, **options, num_gpu_blocks_override=num_blocks, max_model_len=longest)
    check_greedy(model, prompts, generate(tight, prompts))
    assert tight.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("kind", _mostly_slow([*GENERAL], ["gpt_oss"]))
def test_architectures_without_a_family(tmp_path: Path, kind: str) -> None:
    """Through `transformers`' own modelling code on the paged cache; log probabilities are compared as well."""
    config = small_config(kind, **GENERAL_CHANGES.get(kind, {}))
    config.save_pretrained(tmp_path)
    write_model(tmp_path, config)
    reference = references(tmp_path)
    llm = check_parity(tmp_path, reference)
    windows = [group.spec.window for group in llm.engine.kv_layout.groups]
    windowed = {"cohere2", "gpt_oss", "mimo_v2_flash", "vaultgemma"}
    assert any(window is not None for window in windows) == (kind in windowed)
    longest = max(len(tokens) + len(prompt) for prompt, (tokens, _) in zip(general_prompts(), reference, strict=True))
    num_blocks = llm.engine.kv_layout.num_blocks_for(longest) + 2
    tight = check_parity(tmp_path, reference, copies=2, num_gpu_blocks_override=num_blocks, max_model_len=longest)
    assert tight.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("kind", _mostly_slow([*NESTED], ["gemma3", "qwen2_5_vl", "qwen3_vl_moe"]))
def test_the_language_model_of_a_checkpoint_that_has_more(tmp_path: Path, kind: str) -> None:
    """As the whole class computes it. Published files nest only what differs from the defaults of a class."""
    config = nested_config(kind)
    write_model(tmp_path, config)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    changed = config.get_text_config().to_diff_dict()
    fields["text_config"] = {
        name: value for name, value in fields["text_config"].items() if name in (*changed, "model_type")
    }
    file.write_text(json.dumps(fields))
    check_parity(tmp_path)


def test_the_demo_model_ends_where_the_reference_has_its_end_token() -> None:
    llm, prompts = LLM(DEMO, dtype="float32", device="cpu", num_gpu_blocks_override=256), demo_prompts()
    (eos,) = llm.engine.eos_token_ids
    params = [SamplingParams(temperature=0, max_tokens=48, ignore_eos=ignores) for ignores in (True, False)]
    greedy, outputs = (llm.generate(prompts, each) for each in params)
    check_greedy(reference_model(DEMO), prompts, greedy)
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    num_stopped = 0
    for output, whole in zip(outputs, greedy, strict=True):
        (choice,), wanted = output.outputs, whole.outputs[0].token_ids
        ends = eos in wanted
        num_stopped += ends
        assert choice.finish_reason == ("stop" if ends else "length")
        assert choice.token_ids == (wanted[: wanted.index(eos) + 1] if ends else wanted)
        assert choice.text == tokenizer.decode(choice.token_ids)
    assert num_stopped >= 3


def test_seeded_tokens_do_not_depend_on_the_batch(llama: Path) -> None:
    prompts, options = mixed_prompts(), {"dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE}
    params = [
        SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=index, max_tokens=NUM_TOKENS, ignore_eos=True)
        for index in range(len(prompts))
    ]
    roomy = LLM(llama, **options, num_gpu_blocks_override=256)
    alone = [roomy.generate([p], one)[0].outputs[0].token_ids for p, one in zip(prompts, params, strict=True)]
    tight = LLM(llama, **options, num_gpu_blocks_override=18, max_num_batched_tokens=33)
    together = [output.outputs[0].token_ids for output in tight.generate(prompts, params)]
    assert tight.engine.stats().num_preemptions > 0
    assert together == alone
    assert len({tuple(token_ids) for token_ids in together}) == len(together)


ORIGINAL, LONGEST = 32, 64
"""Positions of a model's original context, and of the one that a scaling extends it to."""
_DYNAMIC = {"max_position_embeddings": ORIGINAL, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}


def _longrope(half: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0 + 0.05 * i for i in range(half)], "long_factor": [2.0 + i for i in range(half)]}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **factors}
    return {"max_position_embeddings": LONGEST, "rope_parameters": scaling}


ROPE_SCALINGS = {
    "fused longrope": ("phi3", _longrope(4)),
    "fused dynamic": ("llama", _DYNAMIC),
    "general longrope": ("olmo2", _longrope(8)),
    "general dynamic": ("olmo2", _DYNAMIC),
}


def write_scaled(folder: Path, case: str) -> None:
    kind, changes = ROPE_SCALINGS[case]
    share = {"partial_rotary_factor": 0.5} if kind == "phi3" else {}
    changes = {**changes, "rope_parameters": {**changes["rope_parameters"], "rope_theta": 10_000.0, **share}}
    if kind != "olmo2":
        make_model(folder, kind, vocab_size=131, **changes)
        return
    config = small_config(kind, **changes)
    config.save_pretrained(folder)
    write_model(folder, config)


@pytest.mark.parametrize("case", _mostly_slow([*ROPE_SCALINGS], ["fused longrope", "general dynamic"]))
def test_beyond_the_original_context(tmp_path: Path, case: str) -> None:
    """Sequences rotate as `transformers` rotates one of `max_model_len` tokens, in chunks, preempted and resumed."""
    write_scaled(tmp_path, case)
    prompts = random_prompts([40, 10, 33], vocab_size=131)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 4, "max_model_len": LONGEST}

    def rest_of(llm: LLM, begun: list[list[int]]) -> list[RequestOutput]:
        params = [SamplingParams(temperature=0, max_tokens=LONGEST - len(p), ignore_eos=True) for p in begun]
        return llm.generate(begun, params)

    tight = LLM(tmp_path, **options, num_gpu_blocks_override=20, max_num_batched_tokens=16)
    outputs = rest_of(tight, prompts)
    assert tight.engine.stats().num_preemptions > 0
    model = reference_model(tmp_path)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        with torch.inference_mode():  # with all positions: dynamic scaling depends on their number
            logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        gaps = logits.max(-1).values - logits[range(len(tokens)), tokens]
        assert float(gaps.max()) <= 10 * TIE
    resumed = [prompt + output.outputs[0].token_ids[:9] for prompt, output in zip(prompts, outputs, strict=True)]
    again = rest_of(LLM(tmp_path, **options, num_gpu_blocks_override=80), resumed)
    assert [each.outputs[0].token_ids for each in again] == [each.outputs[0].token_ids[9:] for each in outputs]


def test_the_original_context_is_the_default_and_the_extended_one_the_limit(tmp_path: Path) -> None:
    write_scaled(tmp_path, "fused dynamic")
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 40}
    assert LLM(tmp_path, **options).engine.max_model_len == ORIGINAL
    with pytest.raises(ConfigError, match=f"at most the model's context of {LONGEST}"):
        LLM(tmp_path, max_model_len=LONGEST + 1, **options)
