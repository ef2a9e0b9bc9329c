"""Speculation by n-grams here and in vLLM's CPU build, each beside itself without drafts: `speculation.py --vllm`.

Four processes load the same model folder once and then run a text on as many streams as they are told, one at a time.
Tokens/s are by wall time: vLLM computes in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

Texts = Mapping[str, Mapping[str, Any]]
Run = Callable[[str, int], float]
"""From a text and a number of streams to tokens/s."""
SIDES = ("pagestream", "pagestream, drafts", "vllm", "vllm, drafts")
NUM_DRAFTS = 5
LIMIT_S = 1800.0
READY = "ready"


def make_side(
    name: str, folder: str, max_num_seqs: int
) -> Callable[[Sequence[list[int]], Mapping[str, Any], int], list[int]]:
    """Load an engine; return what generates so many tokens for prompts and returns how many came for each."""
    has_drafts = name.endswith("drafts")
    if name.startswith("pagestream"):
        from pagestream_engine import LLM, SamplingParams

        drafts = {"speculative_method": "ngram", "num_speculative_tokens": NUM_DRAFTS} if has_drafts else {}
        ours = LLM(folder, max_num_seqs=max_num_seqs, enable_prefix_caching=False, **drafts)

        def generate(prompts: Sequence[list[int]], settings: Mapping[str, Any], count: int) -> list[int]:
            given = {**settings, "max_tokens": count, "ignore_eos": True}
            params = [SamplingParams(seed=seed, **given) for seed in range(len(prompts))]
            return [len(each.outputs[0].token_ids) for each in ours.generate(list(prompts), params)]

        return generate

    import vllm  # type: ignore[import-not-found, unused-ignore]

    lookup = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    theirs: Any = vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
        speculative_config=lookup if has_drafts else None,
    )

    def generate_theirs(prompts: Sequence[list[int]], settings: Mapping[str, Any], count: int) -> list[int]:
        params = vllm.SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, **settings)
        outputs = theirs.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
        return [len(each.outputs[0].token_ids) for each in outputs]

    return generate_theirs


def serve_side(name: str, folder: str, work_file: str) -> None:
    """Load a side, then answer each line of standard input, a text and a number of streams, with tokens/s."""
    work = json.loads(Path(work_file).read_text())
    for settings in work["texts"].values():
        if "logit_bias" in settings:  # JSON has no numbers as keys.
            settings["logit_bias"] = {int(token): bias for token, bias in settings["logit_bias"].items()}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What the libraries print is no answer.
    generate = make_side(name, folder, work["max_num_seqs"])
    generate(work["prompts"][:2], {"temperature": 0.0}, 8)
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        text, streams = json.loads(line)
        started = time.perf_counter()
        counts = generate(work["prompts"][:streams], work["texts"][text], work["output_tokens"])
        seconds = time.perf_counter() - started
        if counts != [work["output_tokens"]] * streams:
            raise RuntimeError(f"expected {work['output_tokens']} tokens of each stream, got {counts}")
        print(sum(counts) / seconds, file=answers, flush=True)


@contextmanager
def side(name: str, python: str, folder: Path, work_file: Path) -> Iterator[Run]:
    """Run a side in a process of its own."""
    from vllm_cpu import VLLM_ENVIRONMENT

    cores = sorted(os.sched_getaffinity(0))
    environment = {**os.environ, **VLLM_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}"}
    command = [python, __file__, name, str(folder), str(work_file)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        said, told = process.stdout, process.stdin
        if said is None or told is None:
            raise RuntimeError(f"{name}: expected a process with pipes")
        limit = threading.Timer(LIMIT_S, process.kill)
        limit.daemon = True
        limit.start()
        if said.readline().strip() != READY:
            raise RuntimeError(f"{name} did not load: see above")

        def run(text: str, streams: int) -> float:
            print(json.dumps([text, streams]), file=told, flush=True)
            answer = said.readline()
            if not answer:
                raise RuntimeError(f"{name} ended: see above")
            return float(answer)

        try:
            yield run
        finally:
            told.close()
            process.wait(LIMIT_S)
            limit.cancel()


def compare(vllm_python: str, folder: Path, work: Mapping[str, Any], streams: Sequence[int], rounds: int) -> None:
    """Print a row for each text and number of streams, all sides in turns.

    Args:
        vllm_python: of the environment that vLLM is installed in.
        folder: the model's; a file beside it is written.
        work: prompts, texts (sampling parameters by name), output_tokens and max_num_seqs.
        streams: numbers of streams.
        rounds: of turns.
    """
    work_file = folder.with_name("work.json")
    work_file.write_text(json.dumps(work))
    with ExitStack() as stack:
        runs = {
            name: stack.enter_context(
                side(name, vllm_python if name.startswith("vllm") else sys.executable, folder, work_file)
            )
            for name in SIDES
        }
        print(
            "| text | streams | ours, tok/s | drafts, of without | vLLM, tok/s | drafts, of without | ours, of vLLM's |"
        )
        print("|---|---|---|---|---|---|---|")
        for text in work["texts"]:
            for count in streams:
                rates = [{name: run(text, count) for name, run in runs.items()} for _ in range(rounds)]
                cells = [f"{text} | {count}"]
                for name in ("pagestream", "vllm"):
                    gain = median(rate[f"{name}, drafts"] / rate[name] for rate in rates)
                    cells.append(f"{median(rate[f'{name}, drafts'] for rate in rates):.0f} | {gain:.2f}")
                ratio = median(rate["pagestream, drafts"] / rate["vllm, drafts"] for rate in rates)
                print(f"| {' | '.join(cells)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("folder")
    parser.add_argument("work")
    options = parser.parse_args()
    serve_side(options.side, options.folder, options.work)
