"""Models in the formats of published checkpoints: memory of the process, tokens a second alone and at 16 streams.

    PYTHONPATH=tests python tests/benchmarks/quantised_models.py make FOLDER [--size 1b] [--layers 8] [--forms awq ...]
    PYTHONPATH=tests python tests/benchmarks/quantised_models.py run FOLDER [--forms bfloat16 awq ...] [--threads 1]
    PYTHONPATH=tests python tests/benchmarks/quantised_models.py memory FOLDER/awq

`make` writes a folder for each form: a Llama with the sizes of a published model and random weights, packed as the
form's tools pack them; `experts` forms are a Mixtral of 16 experts, two a token. `run` measures the forms one after the
other, each in a process of its own, and prints a row as soon as it has it, so that a run may be cut into pieces, or
ended; ratios are to the forms `bfloat16` and `experts bfloat16` of the same run. Engines are deterministic. A time is
of the processor with one thread, else of the wall. `memory` prints one process's resident memory by kind of mapping.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Draw = Callable[[int, int], Tensors]
"""(out features, in features) -> the tensors of a linear by suffix."""

SIZES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "heads": 32, "kv_heads": 32, "vocab_size": 32000},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "heads": 32, "kv_heads": 8, "vocab_size": 32000},
    "experts": {"hidden_size": 1024, "intermediate_size": 1024, "heads": 16, "kv_heads": 4, "vocab_size": 32000},
}
"""Llama 2 7B (32 layers), Llama 3.2 1B (16) with a smaller vocabulary, and the mixture of experts."""
NUM_EXPERTS = 16
GROUP, BLOCK = 128, 128
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 32
STREAMS = (1, 16)
TURNS = 3
LIMIT_S = 1800.0


# == Forms ==


def _random(high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.randint(0, high, shape, dtype=dtype)


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).int()


def _scales(*shape: int, size: float = 0.002) -> Tensor:
    return (torch.rand(shape) + 0.5) * size


def _bfloat16(outputs: int, inputs: int) -> Tensors:
    return {"weight": (torch.randn(outputs, inputs) * 0.02).bfloat16()}


def _int8(outputs: int, inputs: int) -> Tensors:
    values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return {"weight": values, "weight_scale": _scales(outputs, 1, size=0.0003).bfloat16()}


def _fp8(outputs: int, inputs: int) -> Tensors:
    scales = _scales(math.ceil(outputs / BLOCK), math.ceil(inputs / BLOCK), size=0.02)
    return {"weight": torch.randn(outputs, inputs).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def _awq(outputs: int, inputs: int) -> Tensors:
    groups = inputs // GROUP
    return {
        "qweight": _words(inputs, outputs // 8),
        "qzeros": torch.full((groups, outputs // 8), -0x77777778, dtype=torch.int32),
        "scales": _scales(groups, outputs).half(),
    }


def _gptq(outputs: int, inputs: int) -> Tensors:
    groups = inputs // GROUP
    return {
        "qweight": _words(inputs // 8, outputs),
        "qzeros": torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": _scales(groups, outputs).half(),
        "g_idx": (torch.arange(inputs) // GROUP).int(),
    }


def _nf4(outputs: int, inputs: int) -> Tensors:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
    return {
        "weight": _random(256, outputs * inputs // 2, 1),
        "weight.absmax": _scales(outputs * inputs // 64, size=0.03),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _nvfp4(outputs: int, inputs: int) -> Tensors:
    return {
        "weight": _random(256, outputs, inputs // 2),
        "weight_scale": _scales(outputs, inputs // 16, size=1.0).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.005),
        "input_scale": torch.tensor(1.0),
    }


_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
FORMS: Mapping[str, tuple[Draw, Mapping[str, Any] | None]] = {
    "bfloat16": (_bfloat16, None),
    "int8": (_int8, _INT8),
    "fp8": (_fp8, _FP8),
    "awq": (_awq, _AWQ),
    "gptq": (_gptq, _GPTQ),
    "bitsandbytes": (_nf4, _NF4),
    "nvfp4": (_nvfp4, _NVFP4),
    "experts bfloat16": (_bfloat16, None),
    "experts int8": (_int8, _INT8),
    "experts fp8": (_fp8, _FP8),
    "experts awq": (_awq, _AWQ),
}
"""What draws a linear, and `quantization_config`."""


# == Making ==


def make(folder: Path, form: str, size: str, num_layers: int) -> None:
    """Write a model; its layers have the same weights, in a file each."""
    has_experts = form.startswith("experts")
    sizes = SIZES["experts" if has_experts else size]
    draw, quantization = FORMS[form]
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    plain = {
        "model.embed_tokens.weight": (torch.randn(vocabulary, hidden) * 0.02).bfloat16(),
        "lm_head.weight": (torch.randn(vocabulary, hidden) * 0.02).bfloat16(),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    layer = _layer(sizes, draw, has_experts=has_experts)
    where = {}
    for name, tensors in (("rest", plain), *((f"layer-{index}", layer) for index in range(num_layers))):
        prefix = "" if name == "rest" else f"model.layers.{name.removeprefix('layer-')}."
        named = {prefix + key: tensor for key, tensor in tensors.items()}
        save_file(named, folder / f"{name}.safetensors", metadata={"format": "pt"})
        where |= dict.fromkeys(named, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    config = {
        "architectures": ["MixtralForCausalLM" if has_experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if has_experts else "llama",
        "hidden_size": hidden,
        "intermediate_size": sizes["intermediate_size"],
        "num_hidden_layers": num_layers,
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **({"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2} if has_experts else {}),
        **({"quantization_config": quantization} if quantization else {}),
    }
    (folder / "config.json").write_text(json.dumps(config))


def _layer(sizes: Mapping[str, int], draw: Draw, *, has_experts: bool) -> Tensors:
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    kv = hidden // sizes["heads"] * sizes["kv_heads"]
    linears = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
    }
    if has_experts:
        for expert in range(NUM_EXPERTS):
            for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
                linears[f"block_sparse_moe.experts.{expert}.{name}"] = shape
    else:
        linears |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    tensors = {f"{name}.{suffix}": each for name, shape in linears.items() for suffix, each in draw(*shape).items()}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    if has_experts:
        tensors["block_sparse_moe.gate.weight"] = torch.randn(NUM_EXPERTS, hidden).bfloat16()
    return tensors


# == Measuring ==


def measure(folder: Path, threads: int) -> dict[str, Any]:
    """Return memory in bytes and tokens a second by streams, of an engine in this process."""
    from pagestream_engine import LLM, SamplingParams
    from pagestream_engine.layers.linear import native_linears

    torch.set_num_threads(threads)
    kernels = native_linears(torch.bfloat16)
    before = resident()
    options = {"device": "cpu", "deterministic": True, "enable_prefix_caching": False, "max_model_len": 512}
    llm = LLM(str(folder), num_gpu_blocks_override=128, **options)
    loaded = resident()
    clock = time.thread_time if threads == 1 else time.perf_counter
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    chance = random.Random(0)

    def generate(streams: int, num_tokens: int) -> float:
        prompts = [[chance.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(streams)]
        begin = clock()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True))
        return clock() - begin

    rates = {}
    for streams in STREAMS:
        seconds = [generate(streams, OUTPUT_TOKENS + 1) - generate(streams, 1) for _ in range(TURNS)]
        rates[streams] = streams * OUTPUT_TOKENS / min(seconds)
    found = {
        "weights": llm.engine.memory_bytes()["model"],
        "before": before,
        "loaded": loaded,
        "served": resident(),
        "peak": _status("VmHWM"),
        "rates": rates,
        "level": kernels.level.name if kernels else "none",
    }
    llm.engine.close()
    return found


def resident() -> int:
    """Return this process's resident bytes."""
    return _status("VmRSS")


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def mappings() -> dict[str, int]:
    """Return resident bytes by kind of mapping."""
    sums: dict[str, int] = {}
    kind = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"[0-9a-f]+-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)", line)
        if head:
            name = head[2]
            kind = "files" if name.startswith("/") else name if name.startswith("[heap") else "anonymous"
        elif line.startswith("Rss:"):
            size = int(line.split()[1]) * 1024
            large = kind == "anonymous" and size >= 32 << 20
            sums[kind + (" of 32 MiB and more" if large else "")] = (
                sums.get(kind + (" of 32 MiB and more" if large else ""), 0) + size
            )
    return sums


def run(folder: Path, forms: list[str], threads: int) -> None:
    """Print a row of each form's process."""
    print("| form | weights, MB | RSS, MB | of it before loading | tokens/s alone | over bf16 | at 16 | over bf16 |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    plain: dict[bool, dict[str, float]] = {}
    for form in forms:
        command = [sys.executable, __file__, "measure", str(folder / form), "--threads", str(threads)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
        if done.returncode:
            print(f"| {form} | failed: {done.stderr.strip().splitlines()[-1]} |", flush=True)
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        rates, has_experts = found["rates"], form.startswith("experts")
        if form.endswith("bfloat16"):
            plain[has_experts] = rates
        cells = [f"{found[name] / 1e6:.0f}" for name in ("weights", "served", "before")]
        for streams in map(str, STREAMS):
            base = plain.get(has_experts, {}).get(streams)
            cells += [f"{rates[streams]:.1f}", f"{rates[streams] / base:.2f}" if base else ""]
        print(f"| {form} |", " | ".join(cells), "|", flush=True)
        print(
            f"<!-- {form}: {found['level']}, loaded {found['loaded'] / 1e6:.0f}, peak {found['peak'] / 1e6:.0f} MB -->"
        )


def memory(folder: Path) -> None:
    """Print resident memory after loading, by kind of mapping."""
    from pagestream_engine import LLM

    before, at = resident(), mappings()
    llm = LLM(str(folder), device="cpu", deterministic=True, num_gpu_blocks_override=128, max_model_len=512)
    weights, loaded, now = llm.engine.memory_bytes(), resident(), mappings()
    print(f"weights {weights['model'] / 1e6:.0f} MB, resident {before / 1e6:.0f} before, {loaded / 1e6:.0f} loaded")
    for kind in sorted({*at, *now}):
        print(f"{kind}: {at.get(kind, 0) / 1e6:.0f} before, {now.get(kind, 0) / 1e6:.0f} loaded")
    llm.engine.close()


def main() -> None:
    """Make, run, or measure one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "run", "measure", "memory"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--size", choices=("1b", "7b"), default="1b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    match options.what:
        case "make":
            for form in options.forms:
                make(options.folder / form, form, options.size, options.layers)
        case "run":
            run(options.folder, options.forms, options.threads)
        case "measure":
            print(json.dumps(measure(options.folder, options.threads)))
        case _:
            memory(options.folder)


if __name__ == "__main__":
    main()
