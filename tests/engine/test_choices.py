"""Choices of one prompt on a real model: the tokens of separate requests, for one prefill and fewer blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pagestream_engine import LLM, Choice, Engine, EngineConfig, Request, SamplingParams, SequenceOutput
from pagestream_engine.sampling_params import child_seed
from support.engines.tiny_models import random_prompts

pytestmark = pytest.mark.served

NUM_TOKENS = 20
BLOCK_SIZE = 8
LENGTHS = [3, 16, 21, 47]
"""Some end with a full block, some do not."""
BACKENDS = ["auto", "torch"]


def make_llm(llama: Path, **options: Any) -> LLM:
    defaults = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 256, "block_size": BLOCK_SIZE}
    return LLM(llama, **{**defaults, **options})


def generate(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[list[int]]]:
    given = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, **params})
    outputs = llm.generate(prompts, given)
    llm.engine.check_invariants()
    assert llm.engine.stats().num_free_blocks == llm.engine.stats().num_blocks
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def one_by_one(llm: LLM, prompt: list[int], n: int, seed: int, **params: Any) -> list[list[int]]:
    """Each choice as a request of its own, from an empty pool's point of view."""
    return [generate(llm, [prompt], seed=child_seed(seed, child), **params)[0][0] for child in range(n)]


@pytest.mark.parametrize(("backend", "caching"), [("auto", True), ("torch", False)])
def test_greedy_siblings_equal_a_request_alone(llama: Path, backend: str, caching: bool) -> None:
    prompts = random_prompts(LENGTHS)
    alone = generate(make_llm(llama, attention_backend=backend), prompts, temperature=0)
    llm = make_llm(llama, attention_backend=backend, enable_prefix_caching=caching)
    assert generate(llm, prompts, temperature=0, n=4) == [choices * 4 for choices in alone]
    assert llm.engine.stats().num_prompt_tokens == sum(LENGTHS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_seeded_siblings_equal_separate_requests(llama: Path, backend: str) -> None:
    sampling: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1}
    llm, other = make_llm(llama, attention_backend=backend), make_llm(llama, attention_backend="torch")
    for prompt in random_prompts(LENGTHS):
        (together,) = generate(llm, [prompt], n=3, seed=11, **sampling)
        assert together == one_by_one(other, prompt, 3, 11, **sampling)
        assert len({tuple(token_ids) for token_ids in together}) == 3


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_groups_go_on_exactly(llama: Path, caching: bool) -> None:
    prompts = random_prompts(LENGTHS)
    sampling: dict[str, Any] = {"temperature": 0.9, "seed": 2, "n": 3, "presence_penalty": 0.5}
    calm = generate(make_llm(llama), prompts, **sampling)
    tight = make_llm(llama, num_gpu_blocks_override=21, max_num_batched_tokens=25, enable_prefix_caching=caching)
    assert generate(tight, prompts, **sampling) == calm
    assert tight.engine.stats().num_preemptions > 0


def test_a_group_larger_than_the_engine_is_served_in_parts(llama: Path) -> None:
    (prompt,) = random_prompts([13])
    calm = generate(make_llm(llama), [prompt], temperature=0.9, seed=2, n=7)
    tight = make_llm(llama, num_gpu_blocks_override=12, max_num_seqs=4, max_num_batched_tokens=16)
    assert generate(tight, [prompt], temperature=0.9, seed=2, n=7) == calm


@pytest.mark.parametrize("caching", [True, False])
def test_choices_in_parts_report_their_prompt_once_and_count_no_hit_of_their_own(llama: Path, caching: bool) -> None:
    (prompt,) = random_prompts([21])
    params = SamplingParams(n=5, seed=2, temperature=0.9, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    (calm,) = make_llm(llama).generate([prompt], params)
    tight = make_llm(llama, max_num_seqs=2, enable_prefix_caching=caching)
    (output,) = tight.generate([prompt], params)
    assert [choice.token_ids for choice in output.outputs] == [choice.token_ids for choice in calm.outputs]
    assert [set(row or ()) for row in output.prompt_logprobs or ()] == [
        set(row or ()) for row in calm.prompt_logprobs or ()
    ]
    assert [[list(row) for row in choice.logprobs or ()] for choice in output.outputs] == [
        [list(row) for row in choice.logprobs or ()] for choice in calm.outputs
    ]
    stats = tight.engine.stats()
    assert output.num_cached_tokens == stats.prefix_hit_tokens == 0
    assert stats.prefix_query_tokens == (len(prompt) if caching else 0)
    assert stats.num_prompt_tokens == (len(prompt) + 2 * (21 - 16) if caching else 3 * len(prompt))


def test_what_was_preempted_and_computed_again_is_no_hit(llama: Path) -> None:
    prompts = random_prompts(LENGTHS)
    tight = make_llm(llama, num_gpu_blocks_override=16)
    outputs = tight.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True, seed=1))
    stats = tight.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_hit_tokens == sum(output.num_cached_tokens for output in outputs) == 0
    assert stats.prefix_query_tokens == sum(LENGTHS)


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority", "shortest_first", "round_robin"])
def test_nobody_waits_while_seats_are_empty(llama: Path, policy: str) -> None:
    """Twelve choices beside a stream in twelve seats: eleven start at once, and a short request follows soon."""
    engine = make_llm(llama, max_num_seqs=12, num_gpu_blocks_override=512, scheduling_policy=policy).engine
    greedy = {"temperature": 0, "ignore_eos": True}
    engine.add_request("stream", [5, 6, 7], SamplingParams(max_tokens=200, **greedy))
    engine.step()
    params = SamplingParams(n=12, max_tokens=4, seed=1, ignore_eos=True)
    engine.add(Request([9, 10], [Choice(f"choice {i}", params.for_child(1, i)) for i in range(12)]))
    engine.add_request("short", [20, 21], SamplingParams(max_tokens=2, **greedy), tenant="other")
    seen: dict[str, int] = {}
    for step in range(16):
        for output in engine.step():
            seen.setdefault(output.seq_id, step)
    assert seen.keys() == {"stream", "short", *(f"choice {i}" for i in range(12))}
    assert seen["short"] < 12


def test_choices_of_the_first_class_displace_as_many_as_there_are(llama: Path) -> None:
    engine = make_llm(llama, max_num_seqs=4, scheduling_policy="priority").engine
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    for number in range(4):
        engine.add_request(f"low {number}", [number + 1], params, priority=number % 2)
    engine.step()
    first = SamplingParams(n=3, max_tokens=40, seed=1, ignore_eos=True)
    engine.add(Request([9, 10], [Choice(f"first {i}", first.for_child(1, i)) for i in range(3)], priority=0))
    engine.step()
    assert {output.seq_id for _ in range(2) for output in engine.step()} == {"low 0", "low 2", "first 0", "first 1"}
    assert engine.stats().num_displaced == 2, "two of another class ran: both make room, and nobody else"


@pytest.mark.parametrize(("policy", "num_before"), [("fair", 4), ("fcfs", 16)])
def test_choices_go_by_the_policy_as_requests_do(llama: Path, policy: str, num_before: int) -> None:
    engine = make_llm(llama, max_num_seqs=4, scheduling_policy=policy).engine
    many = SamplingParams(n=16, max_tokens=6, seed=1, ignore_eos=True)
    engine.add(Request([9, 10], [Choice(f"many {i}", many.for_child(1, i)) for i in range(16)], tenant="a"))
    engine.add_request("one", [20, 21], SamplingParams(max_tokens=6, seed=1, ignore_eos=True), tenant="b")
    ended: list[str] = []
    while engine.has_unfinished_requests():
        ended += [output.seq_id for output in engine.step() if output.finish_reason is not None]
        engine.check_invariants()
    assert num_before - 3 <= ended.index("one") <= num_before + 3


@pytest.mark.parametrize("kind", ["search", "blocks"])
def test_one_that_needs_more_room_is_passed_by_a_bounded_number(llama: Path, kind: str) -> None:
    engine = make_llm(llama, max_num_seqs=6, num_gpu_blocks_override=64, enable_prefix_caching=False).engine
    greedy = SamplingParams(max_tokens=300, temperature=0, ignore_eos=True)
    engine.add_request("stream", random_prompts([90])[0], greedy)
    engine.step()
    if kind == "search":
        beams = SamplingParams(beam_width=6, use_beam_search=True, max_tokens=4)
        engine.add_request("large", [1, 2], beams.for_child(0, 0))
    else:
        engine.add_request("large", random_prompts([410])[0], SamplingParams(max_tokens=4, temperature=0))
    ended: list[str] = []
    for number in range(120):
        engine.add_request(f"small {number}", [3], SamplingParams(max_tokens=1, temperature=0))
    while engine.has_unfinished_requests():
        ended += [output.seq_id for output in engine.step() if output.finish_reason is not None]
        engine.check_invariants()
    assert 64 <= ended.index("stream") <= 70, "up to a bound its neighbours pass it, then they wait with it"
    assert ended.index("stream") < ended.index("large") < 100, "it starts as soon as it has room"


@pytest.mark.parametrize("cut", [1, 13])
def test_a_resumed_group_goes_on_with_what_each_sibling_has(llama: Path, cut: int) -> None:
    params = SamplingParams(n=3, temperature=0.8, max_tokens=NUM_TOKENS, ignore_eos=True, frequency_penalty=0.5)
    (prompt,) = random_prompts([21])
    config = EngineConfig.from_options({"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 64})
    first, second = Engine(llama, config), Engine(llama, config)
    first.add(Request(prompt, [Choice(str(child), params.for_child(5, child)) for child in range(3)]))
    whole = run(first)
    # As a log that was cut within a step: the later siblings have a token less.
    kept = {name: tokens[: cut - (index > 0)] for index, (name, tokens) in enumerate(whole.items())}
    second.add(Request(prompt, [Choice(name, params.for_child(5, int(name)), kept[name]) for name in whole]))
    rest = run(second)
    assert {name: kept[name] + rest[name] for name in whole} == whole


def run(engine: Engine) -> dict[str, list[int]]:
    outputs: list[SequenceOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.check_invariants()
    tokens: dict[str, list[int]] = {}
    for output in outputs:
        tokens.setdefault(output.seq_id, []).append(output.token_id if output.token_id is not None else -1)
    return tokens


def test_siblings_hold_far_fewer_blocks_than_separate_requests(llama: Path) -> None:
    (prompt,) = random_prompts([100])
    n = 8
    peaks = {}
    for kind in ("together", "apart"):
        config = EngineConfig.from_options(
            {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 256, "block_size": BLOCK_SIZE}
        )
        engine = Engine(llama, config)
        params = SamplingParams(temperature=0.9, max_tokens=NUM_TOKENS, ignore_eos=True)
        siblings = [Choice(str(child), params.for_child(3, child)) for child in range(n)]
        if kind == "together":
            engine.add(Request(prompt, siblings))
        else:
            for sibling in siblings:
                engine.add(Request([int(sibling.seq_id) + 3, *prompt[1:]], [sibling]))
        peaks[kind] = 0
        while engine.has_unfinished_requests():
            engine.step()
            stats = engine.stats()
            peaks[kind] = max(peaks[kind], stats.num_blocks - stats.num_free_blocks)
    full = len(prompt) // BLOCK_SIZE
    own = -(-(len(prompt) + NUM_TOKENS - 1) // BLOCK_SIZE) - full
    print(f"{n} choices of a prompt of {len(prompt)} tokens: {peaks['together']} blocks, apart {peaks['apart']}")
    assert peaks["apart"] == n * (full + own)
    assert peaks["together"] == full + n * own
