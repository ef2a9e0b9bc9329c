"""Deterministic mode: the logits of a sequence have the same bits alone and among neighbours, in any chunks, after
preemption and on a cached prefix; and its keys and values have, whether prefill or decode computed them.

The same comparison is made of what promises nothing, to show that it can see a difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import EngineConfig, SamplingParams, Sequence
from pagestream_engine.cpu import instruction_sets, read_cpuinfo, usable_instruction_sets
from pagestream_engine.layers.linear import OnednnMethod, PlainMethod, native_linears
from pagestream_engine.native_build import find_compiler
from pagestream_engine.plan import ScheduledSequence, ScheduledStep
from pagestream_engine.runner import ModelRunner
from support.engines.given_plans import given_plan
from support.engines.recorded_logits import BLOCK_SIZE, NUM_TOKENS, Comparison, Logits, Run, differences
from support.engines.tiny_models import make_model, random_prompts
from support.kernels.worker import KernelWorker
from torch import Tensor

pytestmark = pytest.mark.served

CPU = torch.device("cpu")
DEMO = Path(__file__).parents[2] / "deploy" / "demo-model" / "model"
DTYPES = ["float32", "bfloat16"]
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
BACKENDS = {"native": "auto", "torch": "torch"}
CASES = [
    ("qwen3", "native", "bfloat16"),
    ("llama", "torch", "float32"),
    ("demo", "native", "float32"),
    ("llama", "native", "float32"),  # with instruction sets switched off, as llama with bfloat16
    ("demo", "torch", "bfloat16"),
    ("qwen3", "torch", "float32"),
    ("llama", "native", "bfloat16"),
]
"""Every pair of model, backend and dtype; the first three have every value."""


def cover(num_quick: int) -> list[Any]:
    """Return the cases, of which all but the first ones are slow."""
    params = []
    for place, (name, backend, dtype) in enumerate(CASES):
        marks = [needs_compiler] * (backend == "native") + [pytest.mark.slow] * (place >= num_quick)
        params.append(pytest.param(name, BACKENDS[backend], dtype, marks=marks, id=f"{name}-{backend}-{dtype}"))
    return params


WIDE = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_key_value_heads": 4}
"""What makes qwen3 a third width beside 96 and the demo model's 256."""
LIMITS = ["AVX512_CORE_BF16", "AVX512_CORE", "AVX2", "SSE41"]
"""Values of ONEDNN_MAX_CPU_ISA: without AMX, without AVX512_BF16, without AVX-512, without AVX2."""
_MANY_STEPS = ("test_logits", "test_the_comparison")


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Two, since what threads share out is where a batch's size first shows; one where many small operations of torch
    would wait for each other most of the time.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.node.name.startswith(_MANY_STEPS) and "torch" in request.node.name else 2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder_of(model_of: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda name: DEMO if name == "demo" else model_of(name, **(WIDE if name == "qwen3" else {}))


def _prompts() -> dict[str, list[int]]:
    """Of lengths about the borders of blocks and vectors, two of them with a beginning in common."""
    prompts = random_prompts([1, 5, 16, 17, 41, 70])
    prefix, *tails = random_prompts([40, 3, 21], seed=1)
    return {f"request {index}": prompt for index, prompt in enumerate([*prompts, *(prefix + tail for tail in tails)])}


def _disturbances(folder: Path, options: dict[str, Any]) -> dict[str, Logits]:
    """The same requests under all that may happen to a batch."""
    prompts = _prompts()
    longest = max(map(len, prompts.values())) + NUM_TOKENS
    plain = {**options, "enable_prefix_caching": False}
    neighbours = {f"neighbour {index}": prompt for index, prompt in enumerate(random_prompts([3, 30, 9, 55], seed=2))}
    crowd = Run(folder, plain).generate({**prompts, **neighbours})
    chunked = Run(folder, {**plain, "max_num_batched_tokens": 13, "max_num_seqs": 6})
    tight = Run(folder, {**plain, "num_gpu_blocks_override": -(-longest // BLOCK_SIZE) + 4, "max_model_len": longest})
    caching = Run(folder, {**options, "enable_prefix_caching": True})
    found = {
        "neighbours": {key: logits for key, logits in crowd.items() if key[0] in prompts},
        "chunks": chunked.generate(prompts),
        "preemption": tight.generate(prompts),
        "shared prefixes": caching.generate(prompts),
        "cached prefixes": caching.generate(prompts),
    }
    assert tight.engine.stats().num_preemptions > 0
    assert caching.engine.stats().prefix_hit_tokens > sum(len(prompt) // BLOCK_SIZE for prompt in prompts.values())
    return found


@pytest.mark.parametrize(("name", "backend", "dtype"), cover(3))
def test_logits_have_the_same_bits_whatever_happens(
    name: str, backend: str, dtype: str, folder_of: Callable[[str], Path]
) -> None:
    options = {"deterministic": True, "attention_backend": backend, "dtype": dtype, "device": "cpu"}
    alone = Run(folder_of(name), {**options, "enable_prefix_caching": False})
    expected = alone.alone(_prompts())
    assert len(expected) == NUM_TOKENS * len(_prompts())
    assert alone.runner.numerics.deterministic
    for what, got in _disturbances(folder_of(name), options).items():
        assert differences(got, expected) == [], what
    given = {request: tokens[: NUM_TOKENS // 2] for request, tokens in alone.tokens.items()}
    resumed = Run(folder_of(name), {**options, "max_num_batched_tokens": 40, "max_num_seqs": 8})
    left = {key: logits for key, logits in expected.items() if key[1] >= NUM_TOKENS // 2}
    assert differences(resumed.generate(_prompts(), given), left) == []
    assert {request: given[request] + tokens for request, tokens in resumed.tokens.items()} == alone.tokens


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("torch", "float32"),
        pytest.param("auto", "bfloat16", marks=[needs_compiler, pytest.mark.slow], id="native-bfloat16"),
    ],
)
def test_the_comparison_sees_what_the_default_mode_may_change(
    backend: str, dtype: str, folder_of: Callable[[str], Path]
) -> None:
    """Torch's own attention differs between prefill and decode on every machine; the C++ kernels on linears alone."""
    options = {"deterministic": False, "attention_backend": backend, "dtype": dtype, "device": "cpu"}
    expected = Run(folder_of("llama"), {**options, "enable_prefix_caching": False}).alone(_prompts())
    counts = {what: len(differences(got, expected)) for what, got in _disturbances(folder_of("llama"), options).items()}
    print(f"default mode, {backend}, {dtype}: of {len(expected)} logits differ {counts}")
    if backend == "torch":
        # Which of them differ in bfloat16 depends on the machine's instructions: rounding hides some.
        assert any(counts[what] for what in ("chunks", "preemption", "cached prefixes"))
    usable = usable_instruction_sets(read_cpuinfo(), os.environ)
    if dtype == "bfloat16" and "avx512f" in usable and "avx512_bf16" not in usable:
        # oneDNN emulates bfloat16 there, in an order of additions that the number of rows decides.
        assert any(counts.values())


@pytest.mark.parametrize(
    ("deterministic", "dtype"),
    [(True, "bfloat16"), (False, "bfloat16"), pytest.param(True, "float32", marks=pytest.mark.slow)],
)
def test_libraries_whose_bits_depend_on_the_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool, dtype: str, folder_of: Callable[[str], Path]
) -> None:
    """As on processors whose libraries change their kernel with the number of rows: only one mode uses them."""
    for method in (PlainMethod, OnednnMethod):
        product = method.product

        def uneven(linear: Any, x: Tensor, bias: Tensor | None, product: Any = product) -> Tensor:
            result: Tensor = product(linear, x, bias)
            return result * (1.0 if len(x) % 4 == 0 and len(x) <= 64 else 1.0 + 2.0**-7)

        monkeypatch.setattr(method, "product", uneven)
    options = {"deterministic": deterministic, "dtype": dtype, "device": "cpu"}
    expected = Run(folder_of("llama"), {**options, "enable_prefix_caching": False}).alone(_prompts())
    counts = {what: len(differences(got, expected)) for what, got in _disturbances(folder_of("llama"), options).items()}
    print(f"linears by row count, deterministic={deterministic}, {dtype}: of {len(expected)} logits differ {counts}")
    if deterministic:
        assert not any(counts.values())
    else:
        assert all(counts.values())


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
def test_with_instruction_sets_switched_off(limit: str) -> None:
    """The logits test, and its inverse, in a process that may not use all instruction sets of this processor."""
    environ = {**os.environ, "ONEDNN_MAX_CPU_ISA": limit}
    if usable_instruction_sets(read_cpuinfo(), environ) == instruction_sets(read_cpuinfo()):
        pytest.skip("this processor has none of those")
    chosen = "native and (test_the_comparison or (test_logits_have_the_same_bits and llama))"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, __file__]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{1 + len(DTYPES)} passed" in done.stdout


@pytest.mark.parametrize(("name", "backend", "dtype"), cover(1))
def test_keys_and_values_of_prefill_and_decode_have_the_same_bits(
    name: str, backend: str, dtype: str, folder_of: Callable[[str], Path]
) -> None:
    options = {"deterministic": True, "attention_backend": backend, "dtype": dtype, "block_size": 16, "device": "cpu"}
    (prompt,) = random_prompts([75])
    caches = []
    for cuts in ([75], [1] * 75, [40, *[1] * 35], [7, 30, 1, 1, 33, 3]):
        runner = ModelRunner(folder_of(name), EngineConfig.from_options(options), CPU)
        runner.allocate_kv_cache(8)
        seq = Sequence("one", prompt, SamplingParams(temperature=0), seed=0, arrival=0, max_total_tokens=100)
        seq.block_tables[0] = [6, 0, 3, 7, 1]
        for cut in cuts:
            items = [ScheduledSequence(seq, cut, True)]
            is_decode = cut == 1 and seq.num_computed_tokens > 0
            step = ScheduledStep(decodes=items) if is_decode else ScheduledStep(prefills=items)
            runner.execute(given_plan(step))()
            seq.num_computed_tokens += cut
        caches.append(runner._backend.store.cache[:, :, seq.block_tables[0]])
    for other in caches[1:]:
        assert torch.equal(other, caches[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_auto_is_on_where_it_is_free(dtype: str, folder_of: Callable[[str], Path]) -> None:
    kernels = native_linears(getattr(torch, dtype))
    on_amx = dtype == "bfloat16" and "amx_bf16" in usable_instruction_sets(read_cpuinfo(), os.environ)
    is_free = kernels is not None and kernels.level.is_fast and not on_amx
    for deterministic, expected in ((None, is_free), (True, True), (False, False)):
        runner = Run(folder_of("demo"), {"device": "cpu", "dtype": dtype, "deterministic": deterministic}).runner
        assert runner.numerics.deterministic is expected


def test_the_fingerprint_is_of_what_the_bits_depend_on(folder_of: Callable[[str], Path]) -> None:
    def fingerprint(name: str = "llama", **options: Any) -> str:
        return Run(folder_of(name), {"device": "cpu", "deterministic": True, **options}).engine.fingerprint

    first = fingerprint()
    assert len(first) == 16
    assert int(first, 16) >= 0
    assert fingerprint(max_num_seqs=7, seed=3, enable_prefix_caching=False) == first
    others = [
        fingerprint("qwen3"),
        fingerprint(deterministic=False),
        fingerprint(deterministic=False, dtype="bfloat16"),
        fingerprint(attention_backend="torch"),
        fingerprint(max_model_len=100),
        fingerprint(enable_lora=True),
    ]
    assert len({first, *others}) == len(others) + 1


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""A model that the interpreter runs in a third of a second a step."""


def compare_by_triton(folder: str) -> dict[str, dict[str, int]]:
    """Compare in float32 on a model that is `SMALL`, with a pool that is too small for both requests to end in."""
    from pagestream_engine.attention.triton import DeterministicTritonAttention

    DeterministicTritonAttention.split_tokens = 64  # so that few tokens have two splits
    options = {"attention_backend": "triton", "device": "cpu", "dtype": "float32", "max_model_len": 72}
    prompts = {f"request {index}": prompt for index, prompt in enumerate(random_prompts([23, 63]))}
    tight = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 96, "max_num_seqs": 3}
    exact = Comparison(Path(folder), {**options, "deterministic": True}, prompts, 3)
    default = Comparison(Path(folder), {**options, "deterministic": False}, prompts, 3)
    return {
        "together": exact.together(**tight),
        "resumed": exact.resumed(max_num_batched_tokens=40),
        "default": default.together(**tight),
    }


@pytest.mark.slow
@pytest.mark.builds
@pytest.mark.timeout(600)
def test_the_triton_kernels_under_the_interpreter(tmp_path: Path) -> None:
    """With preemption, resumed, and in conversations whose answers are in the prefix cache."""
    folder = make_model(tmp_path / "model", "llama", **SMALL)
    with KernelWorker("interpret") as interpreter:
        found = interpreter.run(compare_by_triton, str(folder), limit_s=580)
    print(found)
    assert found["together"] == {"differing": 0, "preemptions": 1}
    differing = {what: count for what, count in found["resumed"].items() if what.startswith("differing")}
    assert not any(differing.values()), differing
    assert found["resumed"]["cached tokens of the next turn"] == 56
    assert found["default"]["differing"] > 0


def test_the_demo_model_is_written_in_a_dtype_that_is_tested() -> None:
    assert json.loads((DEMO / "config.json").read_text())["dtype"] in DTYPES
