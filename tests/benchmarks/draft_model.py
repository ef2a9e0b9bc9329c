r"""What a draft model gives: how many of its drafts hold, what they cost, and from which acceptance on they pay.

Acceptance is that of the demo model's draft (`deploy/demo-model/draft`) for the demo model, on the questions that it
was taught: greedy and sampled, with drafts that are drawn by the target's noise, and with the draft model's likeliest
tokens in their place. It needs no quiet machine. Beside it stands the processor time of the demo model without drafts,
by that with them, in turns.

Costs are of the reference model (engine_throughput.py) with drafts by its own first layers: milliseconds of processor
time of a step without drafts and with some, and of making one. From them follow the acceptance at which the best number
of drafts breaks even, and the speed at others: with acceptance p, k drafts give (1 - p ** (k + 1)) / (1 - p) tokens.

    PYTHONPATH=tests OMP_NUM_THREADS=1 python tests/benchmarks/draft_model.py \
        [--draft deploy/demo-model/draft] [--rounds 12]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from engine_throughput import make_model, make_prompts
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.features.speculation.draft_model import DraftLengths
from pagestream_engine.features.speculation.speculation import Speculation
from pagestream_engine.sampler.batch import SamplingBatch
from pagestream_engine.sampler.draw import largest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo-model" / "model"
NUMBERS = (0, 1, 2, 3, 5, 8)
"""Of drafts in a step."""


def first_layers(model: Path, folder: Path, count: int) -> Path:
    """Write a model of the first layers of another, with its embedding and head."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    config["num_hidden_layers"] = count
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    weights = {
        name: weight
        for name, weight in load_file(model / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < count
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@contextmanager
def always(count: Callable[[], int]) -> Iterator[list[list[int]]]:
    """Give each row so many drafts, whatever became of the ones before. Yield of each sequence, step by step, how many
    held where it had so many."""
    held: dict[int, list[int]] = {}
    sequences: list[list[int]] = []

    def start(_self: DraftLengths, row: int) -> None:
        held[row] = []
        sequences.append(held[row])

    def note(_self: DraftLengths, row: int, num_drafts: int, num_accepted: int) -> None:
        if num_drafts == count():
            held[row].append(num_accepted)

    changes = {"wanted": lambda _self, _row: count(), "start": start, "note": note}
    with patch.multiple(DraftLengths, **changes):
        yield sequences


@contextmanager
def likeliest() -> Iterator[None]:
    """Draft the likeliest token, whatever the request's sampling."""
    with patch.object(SamplingBatch, "guess", lambda _self, logits, _rows, _ahead: largest(logits).token_ids):
        yield


def demo_prompts(num_questions: int) -> list[dict[str, list[int]]]:
    """Return the first questions of the demo model's, by its chat template."""
    questions = json.loads((DEMO / "questions.json").read_text())
    chats = [probe["messages"] for name in ("held_out", "two_turns") for probe in questions[name]][:num_questions]
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    return [
        {"prompt_token_ids": tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)}
        for chat in chats
    ]


def print_acceptance(draft: Path, num_questions: int) -> None:
    """Print a row for each temperature: the share of first drafts that hold, of all, and tokens a step."""
    prompts = demo_prompts(num_questions)
    llm = LLM(str(DEMO), device="cpu", speculative_model=str(draft), num_speculative_tokens=5, max_num_seqs=64)
    print("| temperature | drafts | first ones that hold | of all | tokens a step |\n|---|---|---|---|---|")
    for temperature in (0.0, 0.7, 1.0, 1.5):
        params = [SamplingParams(temperature=temperature, seed=seed, max_tokens=64) for seed in range(len(prompts))]
        for name in ("by the target's noise", "the likeliest"):
            if name == "the likeliest" and not temperature:
                continue
            with always(lambda: 5) as sequences, likeliest() if name == "the likeliest" else nullcontext():
                llm.generate(prompts, params)
            full = [held for steps in sequences for held in steps[:-1]]  # The last step goes on behind an end.
            first = sum(held > 0 for held in full) / len(full)
            print(
                f"| {temperature} | {name} | {first:.0%} | {sum(full) / 5 / len(full):.0%} | "
                f"{1 + sum(full) / len(full):.2f} |",
                flush=True,
            )


def print_speed(draft: Path, num_questions: int, rounds: int) -> None:
    """Print a row for each number of streams: processor time of greedy answers without drafts, by that with them."""
    prompts = demo_prompts(num_questions)
    params = SamplingParams(temperature=0.0, max_tokens=64)
    options = {"device": "cpu", "max_num_seqs": 64, "enable_prefix_caching": False}
    engines = [LLM(str(DEMO), **options, **each) for each in ({}, {}, {"speculative_model": str(draft)})]
    print("| streams | speed with drafts, of without | without again |\n|---|---|---|")
    for streams in (1, 8):
        seconds: list[list[float]] = [[], [], []]
        for _ in range(rounds):
            for llm, each in zip(engines, seconds, strict=True):
                started = time.thread_time()
                for first in range(0, len(prompts), streams):
                    batch = prompts[first : first + streams]
                    llm.generate(batch, [params] * len(batch))
                each.append(time.thread_time() - started)
        without, again, drafting = map(median, seconds)
        print(f"| {streams} | {without / drafting:.2f} | {without / again:.2f} |", flush=True)


def measure_costs(model: Path, draft: Path, rounds: int) -> tuple[dict[int, float], float]:
    """Return milliseconds of processor time of a step by its number of drafts, without making them, and of making one:
    the least of all rounds each, for one stream."""
    wanted = 0
    making: list[float] = []
    propose = Speculation.propose

    def timed_propose(self: Speculation, plan: Any) -> Any:
        started = time.thread_time()
        proposed = propose(self, plan)
        making.append(time.thread_time() - started)
        return proposed

    llm = LLM(str(model), speculative_model=str(draft), num_speculative_tokens=max(NUMBERS), max_num_seqs=64)
    steps: dict[int, list[float]] = defaultdict(list)
    drafts: dict[int, list[float]] = defaultdict(list)
    llm.engine.add_request("0", make_prompts(1)[0], SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True))
    with always(lambda: wanted), patch.object(Speculation, "propose", timed_propose):
        llm.engine.step()
        for _ in range(rounds):
            for wanted in NUMBERS:
                for index in range(2):
                    making.clear()
                    started = time.thread_time()
                    llm.engine.step()
                    seconds = time.thread_time() - started
                    if index:  # The first one computes what the draft model lacks.
                        steps[wanted].append(1000 * (seconds - making[0]))
                        drafts[wanted].append(1000 * making[0])
    least = min(drafts[0])
    return {number: min(each) for number, each in steps.items()}, min(
        (min(drafts[number]) - least) / number for number in NUMBERS if number
    )


def best_speed(acceptance: float, steps: dict[int, float], making: float) -> float:
    """Return tokens by time, of those without drafts, with the number of drafts that gives most."""
    return max(
        sum(acceptance**place for place in range(number + 1)) * steps[0] / (step + number * making)
        for number, step in steps.items()
    )


def break_even(steps: dict[int, float], making: float) -> float:
    """Return the least acceptance, in hundredths, from which on drafts are faster than none."""
    return min((each / 100 for each in range(101) if best_speed(each / 100, steps, making) > 1.0), default=1.0)


def print_costs(model: Path, base: Path, layers: Sequence[int], rounds: int) -> None:
    """Print a row for each number of layers of the draft model."""
    print("| layers of 12 | ms a draft | step, 1 draft | 5 drafts | breaks even at | speed at 0.6 | at 0.8 | at 0.9 |")
    print("|---|---|---|---|---|---|---|---|")
    for count in layers:
        steps, making = measure_costs(model, first_layers(model, base / f"draft-{count}", count), rounds)
        speeds = " | ".join(f"{best_speed(each, steps, making):.2f}" for each in (0.6, 0.8, 0.9))
        one, five = steps[1] / steps[0], steps[5] / steps[0]
        print(
            f"| {count} | {making:.2f} | {one:.2f} | {five:.2f} | {break_even(steps, making):.2f} | {speeds} |",
            flush=True,
        )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, help="of the demo model; without it costs alone are printed")
    parser.add_argument("--questions", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--layers", type=int, nargs="*", default=[1, 2, 4])
    args = parser.parse_args()
    if args.draft is not None:
        print_acceptance(args.draft, args.questions)
        print_speed(args.draft, args.questions, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        print_costs(make_model(base / "model", "bfloat16"), base, args.layers, args.rounds)


if __name__ == "__main__":
    main()
