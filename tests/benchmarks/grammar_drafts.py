"""Tokens a step and time of answers in a JSON schema with long keys, with drafts of what the schema forces and without.

Two models: the demo model, which is trained and writes keys as its tokenizer does, but whose steps are mostly host
work; and the reference model (engine_throughput.py), whose steps take what steps take, with random weights and a
tokenizer of one token for each byte, in which all that is forced holds. Answers end by themselves. A second engine
without drafts is timed with the others, as in speculation.py. The tokens of all are compared.

    OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/support python tests/benchmarks/grammar_drafts.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from engine_throughput import SHAPE, make_model
from pagestream_engine import LLM, SamplingParams, StructuredOutputsParams
from support.engines.tiny_models import write_tokenizer

DEMO = Path(__file__).parents[2] / "deploy" / "demo-model" / "model"
FIELDS = {
    "current_temperature_in_celsius": {"type": "integer", "minimum": 0, "maximum": 99},
    "probability_of_precipitation": {"enum": ["none", "low", "medium", "high"]},
    "wind_speed_in_kilometres_per_hour": {"type": "integer", "minimum": 0, "maximum": 99},
    "is_suitable_for_a_walk_on_the_beach": {"type": "boolean"},
}
SCHEMA = {"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False}
CHOICES: dict[str, dict[str, Any]] = {
    "without": {},
    "without again": {},
    "up to 5": {"speculative_method": "grammar"},
    "up to 15": {"speculative_method": "grammar", "num_speculative_tokens": 15},
}


def run(llm: LLM, streams: int) -> tuple[float, list[list[int]]]:
    """Return seconds of the thread, and the tokens of each answer."""
    constraint = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=400, structured_outputs=constraint)
        for seed in range(streams)
    ]
    started = time.thread_time()
    answers = llm.generate([{"prompt": f"What is the weather on day {day}?"} for day in range(streams)], params)
    seconds = time.thread_time() - started
    if not all(answer.outputs[0].finish_reason == "stop" for answer in answers):
        raise SystemExit("an answer did not end by itself")
    return seconds, [answer.outputs[0].token_ids for answer in answers]


def measure(name: str, model: Path, streams: int, rounds: int) -> None:
    """Print a row for each choice."""
    options = {"device": "cpu", "max_num_seqs": 64, "num_gpu_blocks_override": 2000, "enable_prefix_caching": False}
    engines = {choice: LLM(str(model), **options, **given) for choice, given in CHOICES.items()}
    seconds: dict[str, list[float]] = {choice: [] for choice in CHOICES}
    tokens: dict[str, list[list[int]]] = {}
    steps = dict.fromkeys(CHOICES, 0)
    for number in range(rounds + 1):
        for choice, llm in engines.items():
            before = llm.engine.stats().num_steps
            spent, tokens[choice] = run(llm, streams)
            if number:  # The first one compiles the grammar, and learns how many drafts pay.
                seconds[choice].append(spent)
                steps[choice] += llm.engine.stats().num_steps - before
    if engines["without"].engine.is_deterministic and any(each != tokens["without"] for each in tokens.values()):
        raise SystemExit(f"{name}, {streams} streams: the tokens differ")
    num_tokens = sum(map(len, tokens["without"]))
    for choice, llm in engines.items():
        stats = llm.engine.stats()
        share = stats.num_accepted_tokens / stats.num_draft_tokens if stats.num_draft_tokens else 0.0
        ratio = median(ours / theirs for ours, theirs in zip(seconds["without"], seconds[choice], strict=True))
        a_step = rounds * num_tokens / steps[choice]
        print(f"| {name} | {streams} | {choice} | {share:.0%} | {a_step:.2f} | {ratio:.2f} |", flush=True)
        llm.engine.close()


def main() -> None:
    """Print a row for each model, number of streams and choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    print("| model | streams | drafts | accepted | tokens a step | speed, of without |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        reference = make_model(Path(name) / "model", "bfloat16")
        write_tokenizer(reference, SHAPE["vocab_size"])
        for streams in args.streams:
            measure("demo", DEMO, streams, args.rounds)
            measure("reference", reference, streams, args.rounds)


if __name__ == "__main__":
    main()
