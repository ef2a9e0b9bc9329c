"""The engine end to end on a real GPU: its tokens, recorded decodes, resumed requests, and what it compiles late."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

for _module in ("safetensors", "tokenizers", "transformers"):
    pytest.importorskip(_module)

from pagestream_engine import LLM, Engine, EngineConfig, LoRARequest, SamplingParams  # noqa: E402
from pagestream_engine.runner import ModelRunner  # noqa: E402
from support.engines.recorded_logits import Comparison  # noqa: E402
from support.engines.tiny_models import make_model, random_prompts  # noqa: E402

pytestmark = pytest.mark.gpu

_LENGTHS = [40, 3, 17, 90, 9, 64, 1, 33, 5, 21]
_MAX_TOKENS = 24
Tokens = dict[str, list[int]]


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        if "gpu" in os.environ.get("PAGESTREAM_REQUIRE", "").split(","):
            pytest.fail("torch finds no GPU, and PAGESTREAM_REQUIRE asks for one")
        pytest.skip("torch finds no GPU")
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("models")
    return lambda name: make_model(base / name, name)


def _engine(folder: Path, device: str, **options: Any) -> tuple[Engine, ModelRunner]:
    settings = {"dtype": "float32", "num_gpu_blocks_override": 120, "max_num_seqs": 12, "max_model_len": 256}
    backend = "torch" if device == "cpu" else "triton"
    config = EngineConfig.from_options({**settings, "attention_backend": backend, "block_size": 16, **options})
    runners: list[ModelRunner] = []

    def make_runner(folder: Path, config: EngineConfig) -> ModelRunner:
        runners.append(ModelRunner(folder, config, torch.device(device)))
        return runners[-1]

    return Engine(folder, config, make_runner=make_runner), runners[0]


def _params(number: int) -> SamplingParams:
    """Greedy requests, and drawn ones with all that the sampler has."""
    if number % 3:
        return SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True)
    return SamplingParams(
        temperature=0.8,
        top_p=0.9,
        top_k=50,
        seed=number,
        repetition_penalty=1.2,
        logprobs=2,
        max_tokens=_MAX_TOKENS,
        ignore_eos=True,
    )


def _serve(engine: Engine, *, given: Tokens | None = None, most: int = _MAX_TOKENS) -> Tokens:
    """Serve the requests, from tokens that they were given before, until each has `most` or has ended."""
    tokens: Tokens = {name: list(found) for name, found in (given or {}).items()}
    for number, prompt in enumerate(random_prompts(_LENGTHS, seed=2)):
        own = tokens.setdefault(str(number), [])
        engine.add_request(str(number), prompt, _params(number), output_token_ids=own)
    while engine.has_unfinished_requests() and min(map(len, tokens.values())) < most:
        for output in engine.step():
            assert output.error is None, output.error
            if output.token_id is not None:
                tokens[output.seq_id].append(output.token_id)
    return tokens


@pytest.mark.parametrize("model", ["llama", "qwen3-window", "gemma2", "mixtral"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_greedy_tokens_are_those_of_torch_on_a_cpu(
    folder_of: Callable[[str], Path], model: str, *, enforce_eager: bool
) -> None:
    engine, runner = _engine(folder_of(model), "cuda", enforce_eager=enforce_eager)
    assert (runner._graphs is None) == (enforce_eager or model == "mixtral")
    tokens = _serve(engine)
    expected = _serve(_engine(folder_of(model), "cpu")[0])
    greedy = [str(number) for number in range(len(_LENGTHS)) if number % 3]
    assert {name: tokens[name] for name in greedy} == {name: expected[name] for name in greedy}
    assert {len(found) for found in tokens.values()} == {_MAX_TOKENS}
    assert runner.num_late_compilations == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_recorded_decodes_give_the_tokens_of_launched_ones(folder_of: Callable[[str], Path], *, ahead: bool) -> None:
    options = {"num_gpu_blocks_override": 24, "async_scheduling": ahead}
    recorded, runner = _engine(folder_of("llama"), "cuda", **options)
    launched, _ = _engine(folder_of("llama"), "cuda", enforce_eager=True, **options)
    assert runner._graphs is not None
    assert _serve(recorded) == _serve(launched)
    assert recorded.stats().num_preemptions > 0
    assert runner.num_late_compilations == 0


@pytest.mark.parametrize(("model", "deterministic"), [("llama", False), ("llama", True), ("qwen3-moe", False)])
def test_weights_that_come_for_their_turn_give_the_same_tokens(
    folder_of: Callable[[str], Path], model: str, *, deterministic: bool
) -> None:
    folder = make_model(folder_of(model).parent / f"{model}-deep", model, num_hidden_layers=9)
    options = {"deterministic": deterministic, "num_gpu_blocks_override": 24}
    plain, on_device = _engine(folder, "cuda", enforce_eager=True, **options)
    offloading, runner = _engine(folder, "cuda", cpu_offload_gb=0.25, async_scheduling=True, **options)
    assert runner._graphs is None
    assert runner.memory_bytes()["model"] < on_device.memory_bytes()["model"] / 2
    assert _serve(offloading) == _serve(plain)
    assert offloading.stats().num_preemptions > 0


def test_requests_go_on_in_another_engine_as_they_would_have(folder_of: Callable[[str], Path]) -> None:
    undisturbed = _serve(_engine(folder_of("llama"), "cuda")[0])
    first, _ = _engine(folder_of("llama"), "cuda")
    before = _serve(first, most=9)
    first.close()
    resumed, _ = _engine(folder_of("llama"), "cuda")
    assert any(len(found) < _MAX_TOKENS for found in before.values())
    assert _serve(resumed, given=before) == undisturbed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["llama", "qwen3-window"])
def test_deterministic_logits_have_the_same_bits_whatever_happens(
    folder_of: Callable[[str], Path], model: str, dtype: str
) -> None:
    """Over the split of decodes, too: two prompts are longer than 512 tokens less the output."""
    options = {"deterministic": True, "attention_backend": "auto", "device": "cuda", "dtype": dtype, "block_size": 16}
    options |= {"max_model_len": 800, "max_num_seqs": 12, "num_gpu_blocks_override": 300}
    folder = make_model(folder_of(model).parent / f"{model}-long", model, max_position_embeddings=1024)
    lengths = [40, 5, 17, 90, 130, 505, 700]
    prompts = {f"request {index}": prompt for index, prompt in enumerate(random_prompts(lengths, seed=3))}
    comparison = Comparison(folder, options, prompts, 24)
    assert comparison.num_compared == 24 * len(prompts)
    assert comparison.together()["differing"] == 0
    assert comparison.together(enforce_eager=True)["differing"] == 0
    assert comparison.together(max_num_batched_tokens=61)["differing"] == 0
    tight = comparison.together(num_gpu_blocks_override=98, max_num_batched_tokens=256)
    assert tight["differing"] == 0
    assert tight["preemptions"] > 0
    found = comparison.resumed()
    assert not any(count for what, count in found.items() if what.startswith("differing")), found
    assert found["cached tokens of the next turn"] == 688
    assert found["late compilations"] == 0


def test_adapters_are_right_after_an_engine_was_asleep(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    """Their matrices come back to other places than those that the tables named."""
    pytest.importorskip("peft")
    from support.engines.lora_adapters import make_adapter

    folder = folder_of("llama")
    paths = [str(make_adapter(folder, tmp_path / f"adapter {seed}", seed=seed, r=8 * seed)) for seed in (1, 2)]
    wanted = [None, *(LoRARequest(path, number, path) for number, path in enumerate(paths, 1))]
    options = {"dtype": "bfloat16", "attention_backend": "triton", "block_size": 16, "num_gpu_blocks_override": 120}
    llm = LLM(folder, device="cuda", enable_lora=True, max_loras=2, max_model_len=256, max_num_seqs=4, **options)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    def tokens() -> list[list[int]]:
        outputs = llm.generate(random_prompts([9, 9, 9], seed=3), params, lora_request=wanted, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    expected = tokens()
    for _ in range(2):
        llm.sleep()
        taken = torch.full((64 << 20,), 0xFF, dtype=torch.uint8, device="cuda")
        llm.wake_up()
        assert tokens() == expected
        del taken


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_recorded_decodes_over_a_cache_of_fp8_give_the_tokens_of_launched_ones(
    folder_of: Callable[[str], Path], model: str
) -> None:
    options = {"dtype": "bfloat16", "kv_cache_dtype": "fp8", "block_size": 64}
    recorded, runner = _engine(folder_of(model), "cuda", **options)
    launched, _ = _engine(folder_of(model), "cuda", enforce_eager=True, **options)
    assert runner._graphs is not None
    assert _serve(recorded) == _serve(launched)
