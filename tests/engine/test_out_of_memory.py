"""A step that runs out of memory: smaller ones follow, and only a request that does not fit alone fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pagestream_engine import Choice, Engine, EngineConfig, OutOfMemory, Request, SamplingParams, SequenceOutput
from pagestream_engine.plan import PendingResult, StepPlan
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder, undisturbed

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
HUGE = 46
"""First prompt token of a request that takes too much memory."""


class SmallDevice(ArithmeticRunner):
    """Runs out of memory in steps beyond its limits, before or after it has written."""

    max_rows = 1000
    max_tokens = 1000
    huge_fits_without_sample = False
    fails_late = False
    num_failures = 0
    widest = 0

    def execute(self, plan: StepPlan) -> PendingResult:
        if not self.fails_late:
            self._check_memory(plan, {new.row: int(new.token_ids[0]) for new in plan.added})
        given = super().execute(plan)
        if self.fails_late:
            self._check_memory(plan, {})
        self.widest = max(self.widest, len(plan.rows)) if self.num_failures else 0
        return given

    def _check_memory(self, plan: StepPlan, added: dict[int, int]) -> None:
        first = {row: each.token_ids[0] for row, each in self.rows.items()} | added
        rows = plan.sampled_rows if self.huge_fits_without_sample else plan.rows
        is_huge = any(first[row] == HUGE for row in rows.tolist())
        if is_huge or len(plan.rows) > self.max_rows or plan.num_tokens > self.max_tokens:
            self.num_failures += 1
            raise OutOfMemory(f"a step of {plan.num_tokens} tokens")


def make(tmp_path: Path, runner_limits: dict[str, Any], **options: Any) -> tuple[Engine, SmallDevice]:
    config = EngineConfig.from_options({"block_size": 4, "num_gpu_blocks_override": 200, **options})
    runner = SmallDevice(config, ArithmeticFacts())
    for name, limit in runner_limits.items():
        setattr(runner, name, limit)
    return Engine(make_folder(tmp_path), config, make_runner=lambda _, __: runner), runner


def run(engine: Engine) -> dict[str, list[SequenceOutput]]:
    outputs: dict[str, list[SequenceOutput]] = {}
    for _ in range(1500):
        if not engine.has_unfinished_requests():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.seq_id, []).append(output)
        engine.check_invariants()
    raise AssertionError("the engine does not come to an end")


def assert_undisturbed(outputs: list[SequenceOutput], prompt: list[int]) -> None:
    assert [output.token_id for output in outputs] == undisturbed(prompt, GREEDY, ArithmeticFacts(), 4096)
    assert outputs[-1].finish_reason == "length"


@pytest.mark.parametrize("fails_late", [False, True])
@pytest.mark.parametrize(("limit", "value"), [("max_rows", 1), ("max_rows", 3), ("max_tokens", 17), ("max_tokens", 24)])
def test_steps_that_are_too_large_become_smaller_and_no_request_fails(
    tmp_path: Path, limit: str, value: int, fails_late: bool
) -> None:
    engine, runner = make(tmp_path, {limit: value, "fails_late": fails_late}, async_scheduling=fails_late)
    prompts = {str(first): [first, *range(4 + 5 * first)] for first in range(9)}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, GREEDY)
    outputs = run(engine)
    for name, prompt in prompts.items():
        assert_undisturbed(outputs[name], prompt)
    assert runner.num_failures > 0
    assert engine.stats().num_free_blocks == 200


@pytest.mark.parametrize("fails_late", [False, True])
@pytest.mark.parametrize("huge_fits_without_sample", [False, True])
@pytest.mark.parametrize("place", [0, 5, 11])
def test_only_the_request_that_does_not_fit_alone_fails(
    tmp_path: Path, place: int, huge_fits_without_sample: bool, fails_late: bool
) -> None:
    limits = {"huge_fits_without_sample": huge_fits_without_sample, "fails_late": fails_late}
    engine, runner = make(tmp_path, limits, async_scheduling=fails_late)
    prompts = {str(first): [first, *range(first * 3)] for first in range(11)}
    names = list(prompts)
    for name in names[:place]:
        engine.add_request(name, prompts[name], GREEDY)
    engine.add_request("huge", [HUGE, *range(40)], GREEDY)
    for name in names[place:]:
        engine.add_request(name, prompts[name], GREEDY)
    outputs = run(engine)
    for name, prompt in prompts.items():
        assert_undisturbed(outputs[name], prompt)
    (end,) = outputs["huge"]
    assert (end.finish_reason, end.token_id) == ("error", None)
    assert end.error is not None
    assert "out of memory, although it ran alone: a step of" in end.error
    assert runner.num_failures <= 12  # by halving: 12 sequences, then its chunk
    assert engine.stats().num_free_blocks == 200


def test_all_choices_of_the_request_fail_and_no_other(tmp_path: Path) -> None:
    engine, _ = make(tmp_path, {})
    engine.add_request("a", [1, 2, 3], GREEDY)
    choices = [Choice(f"huge-{child}", GREEDY.for_child(7, child)) for child in range(3)]
    engine.add(Request([HUGE, 5, 6, 7, 8], choices))
    engine.add_request("b", [2, 2, 3], GREEDY)
    outputs = run(engine)
    assert_undisturbed(outputs["a"], [1, 2, 3])
    assert_undisturbed(outputs["b"], [2, 2, 3])
    assert {outputs[choice.seq_id][-1].finish_reason for choice in choices} == {"error"}


@pytest.mark.parametrize(("n", "best_of"), [(1, 2), (2, 3)])
def test_all_choices_of_best_of_fail_and_no_other_request(tmp_path: Path, n: int, best_of: int) -> None:
    engine, _ = make(tmp_path, {})
    params = replace(GREEDY, temperature=1.0, n=n, best_of=best_of)
    engine.add(Request([HUGE, *range(40)], [Choice(f"huge/{child}", params.for_child(7, child)) for child in range(n)]))
    engine.add_request("small", [1, 2, 3], GREEDY)
    outputs = run(engine)
    assert_undisturbed(outputs.pop("small"), [1, 2, 3])
    assert [[output.finish_reason for output in each] for each in outputs.values()] == [["error"]] * n


def test_a_request_that_has_ended_is_not_failed_by_the_step_behind_its_end(tmp_path: Path) -> None:
    engine, runner = make(tmp_path, {}, async_scheduling=True, max_num_seqs=1)
    end = undisturbed([1, 2], GREEDY, ArithmeticFacts(), 4096)[2]
    engine.add_request("a", [1, 2], replace(GREEDY, stop_token_ids=(end,)))
    engine.add_request("b", [2, 2], GREEDY)
    outputs = [output for _ in range(3) for output in engine.step()]
    runner.max_rows = 0
    outputs += engine.step()
    assert [output.finish_reason for output in outputs] == [None, None, "stop"]
    runner.max_rows = 1000
    rest = run(engine)
    assert set(rest) == {"b"}
    assert_undisturbed(rest["b"], [2, 2])
    assert runner.num_failures == 1


def test_steps_grow_again_when_they_fit(tmp_path: Path) -> None:
    engine, runner = make(tmp_path, {"max_rows": 3})
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for first in range(8):
        engine.add_request(str(first), [first, 1], params)
    while not runner.num_failures:
        engine.step()
    runner.max_rows = 1000
    outputs = run(engine)
    assert runner.widest == 8
    assert {len(each) for each in outputs.values()} == {60}
