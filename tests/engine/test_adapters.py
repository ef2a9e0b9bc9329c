"""Requests with LoRA adapters, many in one batch: the logits of `transformers` with the weights that PEFT merges."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, AdapterError, ConfigError, InvalidRequest, LoRARequest, RequestOutput, SamplingParams
from pagestream_engine.features.lora.files import read_adapter
from pagestream_engine.plan import ScheduledStep
from safetensors.torch import load_file, save_file
from support.engines.lora_adapters import ATTENTION, MLP, make_adapter, merged_model
from support.engines.tiny_models import VOCAB_SIZE, make_model, random_prompts, reference_model
from torch import Tensor

pytestmark = pytest.mark.served

NUM_TOKENS = 10
LOADERS_READ = "pagestream_engine.features.lora.pool.read_adapter"
"""What the threads that load adapters call for each."""
TOLERANCE = 1e-4
ALL = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=VOCAB_SIZE)
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
FAMILIES: dict[str, list[str]] = {
    "qwen2": [*ATTENTION, *MLP],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gemma2": ["q_proj", "v_proj", "gate_proj"],
    "qwen3-moe": ATTENTION,
    "bloom": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "codegen": ["qkv_proj", "out_proj", "fc_in", "fc_out"],
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(model_of: Callable[..., Path]) -> Path:
    """A Llama whose gates the exact linears fuse."""
    return model_of("llama", intermediate_size=128)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    made = [
        make_adapter(model, folder / "small", seed=1),
        make_adapter(model, folder / "root", seed=2, r=64, use_rslora=True, target_modules=["k_proj", "down_proj"]),
        make_adapter(model, folder / "large", seed=3, r=256, lora_alpha=64, rank_pattern={"v_proj": 8}),
    ]
    return [LoRARequest(path.name, number, str(path)) for number, path in enumerate(made, 1)]


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    """An engine with room, for tests that leave it as it was."""
    return start(model)


def start(model: Path, **options: Any) -> LLM:
    given = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 256, "block_size": 8, **options}
    return LLM(model, enable_lora=True, max_logprobs=-1, **given)


def logprobs(output: RequestOutput) -> Tensor:
    rows = output.outputs[0].logprobs
    assert rows is not None
    return torch.tensor([[row[token].logprob for token in range(VOCAB_SIZE)] for row in rows])


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def check(outputs: Sequence[RequestOutput], references: Sequence[Any]) -> None:
    for output, reference in zip(outputs, references, strict=True):
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([ids[:-1]])).logits[0, len(output.prompt_token_ids) - 1 :].float()
        torch.testing.assert_close(logprobs(output), logits.log_softmax(-1), atol=TOLERANCE, rtol=0)


def test_a_mixed_batch_equals_the_merged_models(model: Path, adapters: list[LoRARequest]) -> None:
    prompts = random_prompts([5, 17, 33, 64, 9])
    wanted = [None, *adapters, adapters[0]]
    llm = start(model, max_num_batched_tokens=40)
    outputs = llm.generate(prompts, ALL, lora_request=wanted)
    merged = {each.lora_name: merged_model(model, Path(each.lora_path)) for each in adapters}
    check(outputs, [reference_model(model) if each is None else merged[each.lora_name] for each in wanted])
    llm.engine.check_invariants()


@pytest.mark.parametrize(
    "name", ["phi3", *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES if each != "phi3")]
)
def test_families(name: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", name)
    folder = make_adapter(model, tmp_path / "adapter", r=8, target_modules=FAMILIES[name])
    outputs = start(model).generate(random_prompts([30, 9]), ALL, lora_request=[LoRARequest("a", 1, str(folder)), None])
    check(outputs, [merged_model(model, folder), reference_model(model)])


@pytest.mark.slow
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("phi3", (2, 2)), ("qwen2", (3, 1)), ("bloom", (2, 1))],
    ids=["stages of two ranks, several projections in one module", "ranks with a KV head each", "heads one by one"],
)
def test_ranks(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    """Of a stage, and the number of stages; with drafts, and chunks of prompts."""
    changes = {"intermediate_size": 132} if name == "qwen2" else {}
    model = make_model(tmp_path / "model", name, **changes)
    of_first_stage = {"target_modules": FAMILIES[name][-1:], "layers_to_transform": [0]}
    folders = [
        make_adapter(model, tmp_path / "one", seed=1, target_modules=FAMILIES[name]),
        make_adapter(model, tmp_path / "two", seed=2, r=64, **of_first_stage),
    ]
    wanted = [None, *(LoRARequest(folder.name, 1, str(folder)) for folder in folders)]
    options = {"speculative_method": "ngram", "prompt_lookup_min": 1, "max_num_batched_tokens": 40}
    llm = start(model, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1], **options)
    try:
        outputs = llm.generate(random_prompts([25, 37, 26]), ALL, lora_request=wanted)
    finally:
        llm.engine.close()
    check(outputs, [reference_model(model), *(merged_model(model, folder) for folder in folders)])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_deterministic_mode(dtype: str, model: Path, adapters: list[LoRARequest]) -> None:
    """A row has the same bits beside rows with other adapters, and one without an adapter beside rows that have one."""
    prompts = random_prompts([5, 17, 33, 64])
    wanted = [None, *adapters]
    llm = start(model, dtype=dtype, deterministic=True)
    together = llm.generate(prompts, ALL, lora_request=wanted)
    alone = [llm.generate([p], ALL, lora_request=each)[0] for p, each in zip(prompts, wanted, strict=True)]
    plain = LLM(model, dtype=dtype, device="cpu", deterministic=True, max_logprobs=-1).generate(prompts[:1], GREEDY)
    assert [torch.equal(logprobs(a), logprobs(b)) for a, b in zip(together, alone, strict=True)] == [True] * 4
    assert token_ids(plain) == token_ids(together[:1])


def test_the_prefix_cache_knows_the_adapter(llm: LLM, adapters: list[LoRARequest]) -> None:
    (prompt,) = random_prompts([40], seed=7)
    first = [llm.generate([prompt], GREEDY, lora_request=each)[0] for each in (None, *adapters)]
    again = [llm.generate([prompt], GREEDY, lora_request=each)[0] for each in (None, *adapters)]
    assert [output.num_cached_tokens for output in first] == [0] * 4
    assert [output.num_cached_tokens for output in again] == [32] * 4
    assert token_ids(first) == token_ids(again)
    assert len({tuple(each) for each in token_ids(first)}) == 4


def test_preemption_and_small_steps(llm: LLM, model: Path, adapters: list[LoRARequest]) -> None:
    prompts = random_prompts([30, 25, 33, 28, 31])
    wanted = [None, *adapters, adapters[1]]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    roomy = llm.generate(prompts, params, lora_request=wanted)
    tight = start(model, num_gpu_blocks_override=14, max_model_len=64, max_num_batched_tokens=16)
    tight.generate(prompts, SamplingParams(max_tokens=1), lora_request=wanted)  # then no request waits for an adapter
    assert token_ids(tight.generate(prompts, params, lora_request=wanted)) == token_ids(roomy)
    assert tight.engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.9, n=3, seed=1, max_tokens=8, ignore_eos=True),
        SamplingParams(use_beam_search=True, beam_width=2, n=2, temperature=0, max_tokens=6),
        SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=2),
    ],
    ids=["choices", "beams", "prompt logprobs"],
)
def test_kinds_of_requests(params: SamplingParams, llm: LLM, adapters: list[LoRARequest]) -> None:
    prompts = random_prompts([21, 14])
    together = llm.generate(prompts, params, lora_request=adapters[:2])
    alone = [llm.generate([p], params, lora_request=each)[0] for p, each in zip(prompts, adapters, strict=False)]
    plain = llm.generate(prompts, params)
    for mixed, one, base in zip(together, alone, plain, strict=True):
        chosen = [choice.token_ids for choice in mixed.outputs]
        assert chosen == [choice.token_ids for choice in one.outputs]
        assert chosen != [choice.token_ids for choice in base.outputs]


@pytest.mark.parametrize(
    "options",
    [{"kv_cache_dtype": "fp8"}, {"quantization": "int8"}, {"swap_space": 0.1, "num_gpu_blocks_override": 24}],
    ids=["float8 cache", "int8 weights", "host memory"],
)
def test_other_ways_to_store(options: dict[str, Any], model: Path, adapters: list[LoRARequest]) -> None:
    prompts = random_prompts([30, 25, 33])
    llm = start(model, max_model_len=64, **options)
    together = token_ids(llm.generate(prompts, GREEDY, lora_request=adapters))
    alone = [llm.generate([p], GREEDY, lora_request=each)[0] for p, each in zip(prompts, adapters, strict=True)]
    assert together == token_ids(alone)
    assert all(a != b for a, b in zip(together, token_ids(llm.generate(prompts, GREEDY)), strict=True))


@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("executor", ["inline", pytest.param("process", marks=pytest.mark.slow)])
def test_files_that_are_gone_fail_their_requests_alone(
    executor: str, model: Path, adapters: list[LoRARequest], tmp_path: Path
) -> None:
    prompts = random_prompts([12, 20, 30, 14])
    lost = Path(shutil.copytree(adapters[0].lora_path, tmp_path / "lost"))
    llm = start(model, executor=executor)
    try:
        wanted = [adapters[1], LoRARequest("lost", 9, str(lost)), None, LoRARequest("lost", 9, str(lost))]
        params = [GREEDY, GREEDY, GREEDY, SamplingParams(use_beam_search=True, beam_width=2, temperature=0)]
        llm.engine.adapters.load("lost", str(lost))
        (lost / "adapter_model.safetensors").unlink()
        outputs = llm.generate(prompts, params, lora_request=wanted)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length", "error"]
        assert "adapter_model.safetensors" in (outputs[1].outputs[0].error or "")
        assert llm.engine.num_requeues == 0
        alone = [llm.generate([prompts[i]], GREEDY, lora_request=wanted[i])[0] for i in (0, 2)]
        assert token_ids([outputs[0], outputs[2]]) == token_ids(alone)
        llm.engine.check_invariants()
    finally:
        llm.engine.close()


def test_others_run_while_files_are_read(
    model: Path, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer: the thread that steps never waits for it, and an abort needs no answer."""
    answers = threading.Event()

    threads: set[threading.Thread] = set()

    def read(adapter: Any, **rest: Any) -> Any:
        threads.add(threading.current_thread())
        if adapter == slow:
            answers.wait()
        return read_adapter(adapter, **rest)

    monkeypatch.setattr(LOADERS_READ, read)
    engine = start(model).engine
    slow, quick = (engine.adapters.take(each) for each in adapters[:2])
    (prompt,) = random_prompts([12])
    engine.add_request("quick", prompt, GREEDY, adapter=quick)
    while not (outputs := engine.step()):
        pass
    for name in ("slow", "aborted"):
        engine.add_request(name, prompt, GREEDY, adapter=slow)
    engine.add_request("none", prompt, GREEDY)
    while {output.seq_id for output in outputs if output.finish_reason} != {"quick", "none"}:
        outputs += engine.step()
    engine.abort_request("aborted")
    assert engine.step() == []
    engine.check_invariants()
    answers.set()
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.seq_id for output in outputs if output.finish_reason][2:] == ["slow"]
    engine.close()
    assert not threads & {threading.main_thread(), *threading.enumerate()}


def test_refusals(llm: LLM, model: Path, adapters: list[LoRARequest], tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="no such file"):
        llm.generate([[1, 2]], GREEDY, lora_request=LoRARequest("none", 1, str(tmp_path / "none")))
    with pytest.raises(AdapterError, match="not loaded"):
        llm.engine.adapters.unload("none")
    with pytest.raises(InvalidRequest, match="2, expected one"):
        llm.generate([[1, 2]], GREEDY, lora_request=adapters[:2])
    adapter = llm.engine.adapters.take(adapters[0])
    without = LLM(model, dtype="float32", device="cpu")
    with pytest.raises(AdapterError, match="enable_lora"):
        without.generate([[1, 2]], GREEDY, lora_request=adapters[0])
    with pytest.raises(InvalidRequest, match="enable_lora"):
        without.engine.add_request("a", [1, 2], GREEDY, adapter=adapter)
    with pytest.raises(ConfigError, match="max_cpu_loras"):
        start(model, max_loras=8, max_cpu_loras=7)
    with pytest.raises(ConfigError, match="cpu_offload_gb"):
        start(model, cpu_offload_gb=1.0)


NUM_ADAPTERS, AT_ONCE, IN_MEMORY = 60, 8, 12


def write_adapter(model: Path, folder: Path, number: int) -> LoRARequest:
    """Write random matrices of rank 1 to 3 for all projections of a model."""
    rank, generator, tensors = 1 + number % 3, torch.Generator().manual_seed(number), {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], rank, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank / 4}))
    return LoRARequest(folder.name, number + 1, str(folder))


def test_more_adapters_than_places(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from their files, leave slots and host memory for others, and come back."""
    made = [write_adapter(model, tmp_path / f"adapter-{number}", number) for number in range(NUM_ADAPTERS)]
    reads: list[str] = []

    def read(adapter: Any, **rest: Any) -> Any:
        reads.append(adapter.name)
        return read_adapter(adapter, **rest)

    monkeypatch.setattr(LOADERS_READ, read)
    llm = start(
        model,
        deterministic=True,
        max_loras=AT_ONCE,
        max_cpu_loras=IN_MEMORY,
        max_num_seqs=2 * AT_ONCE,
        enable_prefix_caching=False,
    )
    (prompt,) = random_prompts([6])
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    at_once: list[int] = []

    def note(step: ScheduledStep) -> None:
        at_once.append(len({entry.seq.adapter_revision for entry in (*step.prefills, *step.decodes)} - {None}))

    llm.engine.on_schedule = note
    together = llm.generate([prompt] * NUM_ADAPTERS, params, lora_request=made)
    assert max(at_once) <= AT_ONCE
    assert sorted(reads) == sorted(each.lora_name for each in made)
    at_once.clear()
    again = llm.generate([prompt] * AT_ONCE, params, lora_request=made[-AT_ONCE:])
    assert max(at_once) == AT_ONCE
    assert token_ids(again) == token_ids(together[-AT_ONCE:])
    # The last ones are in host memory still; the first ones have to be read again, and take the slots of others.
    for number in (*range(4), *range(NUM_ADAPTERS - 4, NUM_ADAPTERS)):
        alone = llm.generate([prompt], params, lora_request=made[number])
        assert token_ids(alone) == token_ids(together[number : number + 1]), number
    assert reads[NUM_ADAPTERS:] == [each.lora_name for each in made[:4]]
    assert len({tuple(each) for each in token_ids(together)}) > NUM_ADAPTERS // 2
    llm.engine.check_invariants()
    llm.engine.close()
