"""What tests run by compiled code, in a process where Triton compiles: each is called with what JSON can carry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from support.engines.tiny_models import random_prompts
from support.kernels.emulator.faults import Fault
from support.kernels.emulator.gpu import EMULATED, EmulatedGPU, emulated, gpu_of
from support.pairwise import Case, pairwise

from kernels import cases

NEEDS_FLOAT8 = ("float8_attention", "rope_and_quantise")
"""Kernels for sm_89 and later."""


def cover(target: str) -> list[tuple[str, Case]]:
    """All pairs of values of each kernel's factors."""
    kernels = [kernel for kernel in cases.FACTORS if target != "sm_80" or kernel not in NEEDS_FLOAT8]
    return [(kernel, case) for kernel in kernels for case in pairwise(cases.FACTORS[kernel])]


def check(target: str, kernel: str, case: Case) -> None:
    """Run one case as `cases.check` does, by the code for `target`; Fault where that code does wrong."""
    with emulated(gpu_of(target)):
        cases.check(kernel, case)


def faults_without(target: str, kernel: str, case: Case, function: str, pattern: str) -> list[tuple[str, str]]:
    """Run one case again and again, each time without one of a function's instructions that match.

    Returns:
        Of each: the instruction, and the fault; "wrong" where there was none but the result differs, else "".
    """
    instruction = re.compile(rf"\n\s*({pattern})[^;\n]*;")
    places: list[re.Match[str]] = []

    def look(name: str, ptx: str) -> str:
        if name == function and not places:  # of its first build
            places.extend(instruction.finditer(ptx))
        return ptx

    with emulated(EmulatedGPU(EMULATED[target], look)):
        cases.check(kernel, case)
    found = []
    for place in places:

        def leave_out(name: str, ptx: str, place: re.Match[str] = place) -> str:
            begin, end = place.span()
            return ptx[:begin] + ptx[end:] if name == function and ptx[begin:end] == place[0] else ptx

        with emulated(EmulatedGPU(EMULATED[target], leave_out)):
            found.append((" ".join(place[0].split()), _outcome(kernel, case)))
    return found


def fault_of_changed(target: str, kernel: str, case: Case, old: str, new: str) -> str:
    """Run one case with other text in its PTX, and return the fault, as `faults_without`."""

    def change(name: str, ptx: str) -> str:
        changed, count = re.subn(old, new, ptx)
        assert count, f"{name} has no {old}"
        return changed

    with emulated(EmulatedGPU(EMULATED[target], change)):
        return _outcome(kernel, case)


def _outcome(kernel: str, case: Case) -> str:
    try:
        cases.check(kernel, case)
    except Fault as fault:
        return str(fault)
    except AssertionError:
        return "wrong"
    return ""


def outputs_by_order(target: str, case: Case, seeds: Sequence[int]) -> list[list[float]]:
    """A decode's result for each seed of the order in which warps and programs run."""
    import pagestream_kernels as kernels

    lengths = cases.decode_lengths(case)
    cpu = torch.device("cpu")
    cache = cases.make_cache(case, lengths, cpu)
    query, _, _ = cases.fused_rows(case, len(lengths), cpu)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    results = []
    for seed in seeds:
        with emulated(gpu_of(target)) as gpu:
            gpu.order.seed(seed)
            out = kernels.paged_decode_attention(query, cache.key, cache.value, cache.tables, seq_lens, scale=0.1)
        results.append(out.float().flatten().tolist())
    return results


def generate(target: str | None, folder: str, lengths: Sequence[int], options: Mapping[str, Any]) -> dict[str, Any]:
    """Generate by a model's folder: by compiled code, or with no target by torch's operations.

    In float32 every second output is drawn; in 16 bits a rounding may decide a draw.

    Returns:
        Token ids of each choice, and the number of launches.
    """
    from pagestream_engine import LLM, SamplingParams

    def tokens(backend: str) -> list[list[int]]:
        llm = LLM(folder, attention_backend=backend, max_model_len=256, num_gpu_blocks_override=12, **options)
        hot = 0.9 if options["dtype"] == "float32" else 0.0
        params = [
            SamplingParams(temperature=temperature, top_p=0.9, seed=3, max_tokens=3, ignore_eos=True)
            for temperature in (0.0, hot, 0.0)[: len(lengths)]
        ]
        outputs = llm.generate(random_prompts(lengths, seed=1), params, use_tqdm=False)
        return [list(choice.token_ids) for output in outputs for choice in output.outputs]

    if target is None:
        return {"tokens": tokens("torch"), "launches": 0}
    with emulated(gpu_of(target)) as gpu:
        before = gpu.num_launches
        return {"tokens": tokens("triton"), "launches": gpu.num_launches - before}
