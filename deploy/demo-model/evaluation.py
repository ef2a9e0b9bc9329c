"""Asks a trained model questions that were held out of training, greedily, and compares with the world's answers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from calls import Need, draw_need, draw_toolbox
from corpus import held_out_questions
from objects import draw_object
from places import draw_asked_place
from questions import all_facts

BATCH = 32
MAX_NEW_TOKENS = 160


@dataclass(frozen=True)
class Probe:
    """A conversation that ends with a question or a tool's result, and the one right answer, with calls as the model
    writes them. `tools`: those that it offers, in OpenAI's form.
    """

    relation: str
    messages: tuple[dict[str, Any], ...]
    answer: str
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Reply:
    """The model's answer, and the least margin between its two best logits over all tokens."""

    text: str
    margin: float


def held_out_probes() -> list[Probe]:
    """Return one probe for each pair of fact and wording that is held out of training."""
    return [
        Probe(held.fact.relation, ({"role": "user", "content": held.question},), held.fact.answer)
        for held in held_out_questions()
    ]


def two_turn_probes(seed: int, count: int) -> list[Probe]:
    """Return questions about a villager whom only the turn before names."""
    rng = Random(seed)
    facts = [fact for fact in all_facts() if fact.follow_ups]
    probes = []
    for _ in range(count):
        first = rng.choice(facts)
        second = rng.choice([fact for fact in facts if fact.about == first.about and fact is not first])
        turns = ((rng.choice(first.questions), first.answer), (rng.choice(second.follow_ups), second.answer))
        messages = (
            {"role": "user", "content": turns[0][0]},
            {"role": "assistant", "content": turns[0][1]},
            {"role": "user", "content": turns[1][0]},
        )
        probes.append(Probe(f"two turns: {second.relation}", messages, turns[1][1]))
    return probes


def drawn_probes(maker: Callable[[Random], tuple[str, str]], relation: str, *, seed: int, count: int) -> list[Probe]:
    """Return questions with one right answer, drawn as in training, which may have had the same ones."""
    rng = Random(f"{relation} {seed}")
    exchanges = [maker(rng) for _ in range(count)]
    return [Probe(relation, ({"role": "user", "content": question},), answer) for question, answer in exchanges]


def object_probes(seed: int, count: int) -> list[Probe]:
    """Return requests for villagers and boats as JSON."""
    rng = Random(f"objects {seed}")
    asked = [draw_object(rng) for _ in range(count)]
    return [Probe("object", ({"role": "user", "content": each.question},), each.text) for each in asked]


def call_probes(seed: int, count: int) -> list[Probe]:
    """Return questions that need one or two calls of the tools that are offered."""
    rng = Random(f"calls {seed}")
    probes = []
    for _ in range(count):
        toolbox = draw_toolbox(rng)
        need = draw_need(toolbox, rng, draw_asked_place)
        tools = tuple(tool.definition for tool in toolbox.tools)
        question = {"role": "user", "content": need.question}
        probes.append(Probe("call" if len(need.calls) == 1 else "two calls", (question,), need.text, tools))
    return probes


def result_probes(seed: int, count: int) -> list[Probe]:
    """Return conversations whose calls have their results."""
    rng = Random(f"results {seed}")
    probes = []
    for _ in range(count):
        toolbox = draw_toolbox(rng)
        need = draw_need(toolbox, rng, draw_asked_place)
        tools = tuple(tool.definition for tool in toolbox.tools)
        probes.append(Probe("result" if len(need.calls) == 1 else "two results", called(need), need.answer, tools))
    return probes


def called(need: Need) -> tuple[dict[str, Any], ...]:
    """Return a question, its calls and their results as messages."""
    names = [f"call_{number}" for number in range(len(need.calls))]
    calls = [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for name, call in zip(names, need.calls, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": name, "content": result}
        for name, result in zip(names, need.results, strict=True)
    ]
    question = {"role": "user", "content": need.question}
    return (question, {"role": "assistant", "content": None, "tool_calls": calls}, *results)


@torch.inference_mode()
def replies(model: Any, tokenizer: Any, probes: Sequence[Probe]) -> Iterator[Reply]:
    """Return greedy answers in float32, in the order of the probes, of a model and tokenizer of `transformers`."""
    for start in range(0, len(probes), BATCH):
        prompts = [
            tokenizer.apply_chat_template(
                list(probe.messages), tools=list(probe.tools) or None, add_generation_prompt=True, tokenize=False
            )
            for probe in probes[start : start + BATCH]
        ]
        inputs = tokenizer(
            prompts, add_special_tokens=False, padding=True, return_tensors="pt", return_token_type_ids=False
        )
        output = model.generate(
            **inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        new_ids = output.sequences[:, inputs["input_ids"].shape[1] :]
        best_two = torch.stack(output.logits, dim=1).topk(2).values
        gaps = (best_two[..., 0] - best_two[..., 1]).masked_fill(new_ids == tokenizer.pad_token_id, float("inf"))
        for row, gap in zip(new_ids, gaps, strict=True):
            yield Reply(tokenizer.decode(row, skip_special_tokens=True), gap.min().item())
