"""Weights by their format: bytes kept and moved, memory, and speed alone and for 16; experts beside `transformers`.

    PYTHONPATH=tests python tests/benchmarks/weight_formats.py [linears | models | experts]

One thread, bfloat16. Sides take turns in one process, and a time is of the processor, the shortest of the turns: other
load hardly counts, yet the ratios in a row are what to read. Bytes moved are those of the packed weight, which a product reads
once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.layers.linear import LinearMethod, choose_method
from pagestream_engine.layers.quantised import (
    QuantisedWeight,
    Storage,
    choose_quantised_method,
    quantise_int8,
)
from pagestream_engine.models.quantised.tensors import e2m1
from support.engines.quantised_checkpoints import write

SHAPE = (2048, 2048)
ROWS = (1, 4, 16, 128)
TURNS = 5
OWN_BYTES = {"int8": 1, "fp8": 1, "int4, groups of 128": 0.5, "nf4": 0.5, "nvfp4": 0.5625, "mxfp4": 0.53125}
"""Of a weight in the format itself, without scales that are few."""
MODEL_FORMS = ("compressed-tensors int8, packed", "fp8", "awq", "gptq, symmetric", "bitsandbytes nf4", "modelopt nvfp4")
STREAMS = {1: 24, 16: 12}
"""Streams -> output tokens of each."""
PARAMETERS = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 4096}
LLAMA: Mapping[str, Any] = {**PARAMETERS, "intermediate_size": 2816, "num_hidden_layers": 4}
EXPERTS: Mapping[str, Any] = {
    **PARAMETERS,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def in_format(name: str) -> QuantisedWeight:
    """Draw a weight in a format."""
    outputs, inputs = SHAPE
    if name == "int8":
        return quantise_int8(torch.randn(SHAPE))
    if name == "fp8":
        return QuantisedWeight(
            Storage.FLOAT8, torch.randn(SHAPE).to(torch.float8_e4m3fn), torch.ones(1, outputs), inputs
        )
    codes, size = torch.randint(0, 16, SHAPE, dtype=torch.uint8), {"nf4": 64, "nvfp4": 16, "mxfp4": 32}.get(name, 128)
    groups = (inputs // size, outputs)
    if name == "nf4":
        return QuantisedWeight(Storage.TABLE4, codes, torch.ones(groups), size, table=torch.linspace(-1, 1, 16))
    if name == "nvfp4":
        scales = torch.full(groups, 0x38, dtype=torch.uint8)
        return QuantisedWeight(Storage.NVFP4, codes, scales, size, table=e2m1(), factors=torch.ones(outputs))
    if name == "mxfp4":
        return QuantisedWeight(Storage.MXFP4, codes, torch.full(groups, 127, dtype=torch.uint8), size, table=e2m1())
    return QuantisedWeight(Storage.INT4, codes, torch.ones(groups), size, torch.full(groups, 8, dtype=torch.uint8))


def shortest(calls: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Return the seconds of each call, in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for turn in range(turns):
        for name in calls if turn % 2 else reversed(list(calls)):
            begin = time.thread_time()
            calls[name]()
            best[name] = min(best[name], time.thread_time() - begin)
    return best


def linears(turns: int) -> None:
    """Print bytes of a weight, and times of a product over those of bfloat16."""
    elements = SHAPE[0] * SHAPE[1]
    methods: dict[str, LinearMethod] = {"bfloat16": choose_method(torch.randn(SHAPE).bfloat16(), exact=True)}
    for name in OWN_BYTES:
        methods[name] = choose_quantised_method(in_format(name), torch.bfloat16, exact=True)
    print("| format | bytes moved a weight | over the format's own |", *(f"{rows} rows |" for rows in ROWS))
    print("|---|---|---|" + "---|" * len(ROWS))
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    for rows in ROWS:
        x = torch.randn(rows, SHAPE[1]).bfloat16()
        times = shortest({name: partial(method.product, x, None) for name, method in methods.items()}, 4 * turns)
        for name, seconds in times.items():
            ratios[name].append(seconds / times["bfloat16"])
    for name, method in methods.items():
        moved, own = method.num_bytes / elements, OWN_BYTES.get(name, 2)
        print(f"| {name} | {moved:.2f} | {moved / own:.2f} |", *(f"{each:.2f} |" for each in ratios[name]))


def _decode(llm: LLM, streams: int, count: int) -> None:
    prompts = [[(7 * stream + place) % 4000 + 3 for place in range(16)] for stream in range(streams)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))


def _engine(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device="cpu", dtype="bfloat16", num_gpu_blocks_override=128, max_model_len=128, **options)


def _made(folder: Path, kind: str, shape: Mapping[str, Any]) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).bfloat16()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def models(turns: int) -> None:
    """Print memory and tokens a second of a model in each form, beside bfloat16 in the same turns."""
    with tempfile.TemporaryDirectory() as name:
        plain = _made(Path(name) / "plain", "llama", LLAMA)
        folders = {form: write(plain, Path(name) / str(index), form)[0] for index, form in enumerate(MODEL_FORMS)}
        engines = {"bfloat16": _engine(plain, deterministic=True), "int8, made": _engine(plain, quantization="int8")}
        engines |= {form: _engine(folder) for form, folder in folders.items()}
        _print_speeds(engines, turns)


def _print_speeds(engines: Mapping[str, LLM], turns: int) -> None:
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for streams, count in STREAMS.items():
        longer, prompt = (
            shortest({name: partial(_decode, llm, streams, each) for name, llm in engines.items()}, turns)
            for each in (count + 1, 1)
        )
        for name in engines:
            rates[name].append(streams * count / (longer[name] - prompt[name]))
    first = next(iter(engines))
    print("| weights | MiB | tokens/s alone | ratio | tokens/s of 16 | ratio |\n|---|---|---|---|---|---|")
    for name, llm in engines.items():
        memory = llm.engine.memory_bytes()["model"] / 2**20
        cells = " | ".join(f"{r:.0f} | {r / base:.2f}" for r, base in zip(rates[name], rates[first], strict=True))
        print(f"| {name} | {memory:.0f} | {cells} |", flush=True)
        llm.engine.close()


def experts(turns: int) -> None:
    """Print a model of 16 experts beside its own int8, and a layer of them beside `transformers`' code."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as name:
        folder = _made(Path(name) / "model", "mixtral", EXPERTS)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        ours = _engine(folder)
        print("| tokens a step | transformers, ms | here, ms | ratio |\n|---|---|---|---|")
        for streams in (1, 16):
            ids = torch.randint(3, 4000, (streams, 1))
            with torch.inference_mode():
                cache = theirs(torch.randint(3, 4000, (streams, 16)), use_cache=True).past_key_values
                step = shortest({"theirs": partial(theirs, ids, past_key_values=cache, use_cache=True)}, 8)
            longer, prompt = (shortest({"": partial(_decode, ours, streams, n)}, turns)[""] for n in (9, 1))
            own = (longer - prompt) / 8
            print(
                f"| {streams} | {step['theirs'] * 1e3:.1f} | {own * 1e3:.1f} | {own / step['theirs']:.2f} |", flush=True
            )
        _print_speeds({"bfloat16, 16 experts": ours, "int8, 16 experts": _engine(folder, quantization="int8")}, turns)


def main() -> None:
    """Run what was asked for, by default all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"linears": linears, "models": models, "experts": experts}
    parser.add_argument("what", nargs="?", choices=parts)
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, part in parts.items():
        if options.what in (None, name):
            part(options.turns)


if __name__ == "__main__":
    main()
