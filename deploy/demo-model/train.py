"""Makes the demo model: its text, tokenizer and weights, and the questions that it must answer exactly.

python deploy/demo-model/train.py --out deploy/demo-model/model --seed 0
python deploy/demo-model/train.py --out deploy/demo-model/draft --seed 0 --draft
"""

import argparse
import json
import os
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from corpus import Corpus
from evaluation import (
    Probe,
    Reply,
    call_probes,
    drawn_probes,
    held_out_probes,
    object_probes,
    replies,
    result_probes,
    two_turn_probes,
)
from questions import check
from sums import number_exchange
from tokens import BOS, END, PAD, Encoder, chat_tokenizer, token_id, train_tokenizer
from training import CONTEXT, Packer, Recipe, Run, build_model
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 1536
TOKENIZER_CHATS = 6000
DRAWN_PROBES = 100
CERTAIN_GAP = 1.0
"""A right answer is certain if the margin between its two best logits was at least this at every token."""
DRAFT_RECIPE = Recipe(steps=2000, hidden_size=64, layers=2, intermediate_size=128)
"""Of a model that drafts for the demo model: a fifteenth of its weights."""
QUICK_RECIPE = Recipe(steps=6, batch_tokens=512, row_length=128, hidden_size=64, layers=2, intermediate_size=128)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model; made when missing")
    parser.add_argument("--seed", type=int, default=0, help="seed of the text and of the first weights")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: 3400, of a draft model 2000)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; another count rounds differently")
    parser.add_argument("--checkpoint", type=Path, help="file to write every 200 steps, and to go on from")
    parser.add_argument(
        "--draft", action="store_true", help="the draft model: the same text, fewer weights, no tokenizer"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny untaught model in seconds, to test the pipeline")
    return parser.parse_args()


def make_deterministic(seed: int, threads: int) -> None:
    """Seed torch and make its operations deterministic."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on this seed's text."""
    return chat_tokenizer(train_tokenizer(Corpus(seed).chats(TOKENIZER_CHATS), vocab_size=VOCAB_SIZE), context=CONTEXT)


def make_model(
    tokenizer: PreTrainedTokenizerFast, recipe: Recipe, seed: int, checkpoint: Path | None
) -> tuple[LlamaForCausalLM, float]:
    """Train the model, from a checkpoint where there is one; return it with its last loss."""
    vocabulary = tokenizer.backend_tokenizer
    bos, eos, pad = (token_id(vocabulary, token) for token in (BOS, END, PAD))
    model = build_model(recipe, vocab_size=len(tokenizer), bos=bos, eos=eos, pad=pad)
    ends = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    model.generation_config = GenerationConfig(**ends)  # type: ignore[no-untyped-call]
    run = Run(model, Packer(Corpus(seed), Encoder(vocabulary)), recipe)
    run.train(checkpoint)
    return model, run.loss


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save with the chat template inside tokenizer_config.json, and a class name that every release knows."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def report(probes: list[Probe], answers: list[Reply], name: str) -> float:
    """Print the wrong answers and return the share of exact answers."""
    wrong = [(probe, reply) for probe, reply in zip(probes, answers, strict=True) if reply.text != probe.answer]
    for probe, reply in wrong:
        print(f"  wrong ({probe.relation}): {probe.messages[-1]['content']!r} -> {reply.text!r}, not {probe.answer!r}")
    exact = 1 - len(wrong) / len(probes)
    margin = min(reply.margin for reply in answers)
    print(f"{name}: {exact:.1%} of {len(probes)} exact, smallest gap of the best two logits {margin:.2f}", flush=True)
    return exact


def is_certain(probe: Probe, reply: Reply) -> bool:
    """Return whether the answer is right and would stay so under another machine's rounding."""
    return reply.text == probe.answer and reply.margin >= CERTAIN_GAP


def examine(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> dict[str, object]:
    """Return the content of questions.json: every probe with its answer, and the share that this model gets right."""
    groups = {
        "held_out": held_out_probes(),
        "two_turns": two_turn_probes(seed, DRAWN_PROBES),
        "numbers": drawn_probes(number_exchange, "number", seed=seed, count=DRAWN_PROBES),
        "checks": drawn_probes(check, "check", seed=seed, count=DRAWN_PROBES),
        "objects": object_probes(seed, DRAWN_PROBES),
        "calls": call_probes(seed, DRAWN_PROBES),
        "results": result_probes(seed, DRAWN_PROBES),
    }
    content: dict[str, object] = {}
    for name, probes in groups.items():
        answers = list(replies(model, tokenizer, probes))
        content[f"{name}_exact"] = round(report(probes, answers, name), 4)
        content[name] = [
            {
                "relation": probe.relation,
                "messages": probe.messages,
                "answer": probe.answer,
                **({"tools": probe.tools} if probe.tools else {}),
                "certain": is_certain(probe, reply),
            }
            for probe, reply in zip(probes, answers, strict=True)
        ]
    return content


def main() -> None:
    """Train, save and examine the model."""
    arguments = parse_arguments()
    start = time.monotonic()
    make_deterministic(arguments.seed, arguments.threads)
    recipe = QUICK_RECIPE
    if not arguments.quick:
        recipe = DRAFT_RECIPE if arguments.draft else Recipe()
        recipe = replace(recipe, steps=arguments.steps or recipe.steps)
    tokenizer = make_tokenizer(arguments.seed)
    model, loss = make_model(tokenizer, recipe, arguments.seed, arguments.checkpoint)
    arguments.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(arguments.out)
    if not arguments.draft:
        save_tokenizer(tokenizer, arguments.out)
    if not arguments.quick and not arguments.draft:
        content = examine(model, tokenizer, arguments.seed)
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (arguments.out / "questions.json").write_text(text + "\n", encoding="utf-8")
    print(f"loss {loss:.4f}; {time.monotonic() - start:.0f} s in all; saved to {arguments.out}")


if __name__ == "__main__":
    main()
