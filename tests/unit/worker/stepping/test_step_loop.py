"""The loop that steps an engine: commands in, reports out."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pagestream_engine import Engine, EngineConfig, SamplingParams, Sibling, StepOutput
from pagestream_engine.errors import OutOfMemory
from pagestream_engine.executor.base import Runner
from pagestream_engine.request import generation
from pagestream_engine.step.pending import PendingResult
from pagestream_engine.step.records import StepPlan
from pagestream_worker.stepping import step_loop
from pagestream_worker.stepping.commands import AbortSequences, AddGroup, StepMarked, Stop
from pagestream_worker.stepping.reports import Figures, Refused, Report, StepBegun, StepDone
from pagestream_worker.stepping.step_loop import CommandQueue, StepLoop
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder, undisturbed

LIMIT_S = 10.0
FACTS = ArithmeticFacts()
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)


class Owner:
    """A loop on a thread of its own, and what it reports."""

    def __init__(
        self, folder: Path, runner: Callable[[EngineConfig, ArithmeticFacts], Runner] = ArithmeticRunner, **options: int
    ) -> None:
        config = EngineConfig.from_options(options)
        engine = Engine(make_folder(folder), config, make_runner=lambda _, config: runner(config, FACTS))
        self.commands = CommandQueue()
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.seen: list[Report] = []
        self.thread = threading.Thread(target=StepLoop(engine, self.commands, self.reports.put).run, daemon=True)
        self.thread.start()

    def next(self, *kinds: type[Report]) -> Report:
        """Return the next report of some kinds."""
        while True:
            self.seen.append(self.reports.get(timeout=LIMIT_S))
            if isinstance(self.seen[-1], kinds):
                return self.seen[-1]

    @property
    def steps(self) -> list[StepDone]:
        return [report for report in self.seen if isinstance(report, StepDone)]

    def next_outputs(self) -> Sequence[StepOutput]:
        report = self.next(StepDone, Refused)
        return report.outputs if isinstance(report, StepDone | Refused) else ()

    def tokens_of(self, seq_id: str) -> list[int]:
        tokens: list[int] = []
        while True:
            for output in self.next_outputs():
                if output.seq_id == seq_id:
                    tokens += [] if output.token_id is None else [output.token_id]
                    if output.finish_reason is not None:
                        return tokens

    def end(self) -> None:
        self.commands.put(Stop())
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        while not self.reports.empty():
            self.seen.append(self.reports.get())


def test_plain_tokens_of_a_sequence_with_a_log_are_reported_in_columns(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.commands.put(AddGroup([1, 2, 3], [Sibling("a", PARAMS, [])], log=7))
    owner.commands.put(AddGroup([1, 2, 3], [Sibling("b", PARAMS, [])]))
    whole = owner.tokens_of("b")
    owner.end()
    rows = [row for step in owner.steps for row in step.tokens.rows()]
    assert [(log, token_id) for log, token_id, _ in rows] == [(7, token_id) for token_id in whole[1:-1]]
    assert [output.token_id for step in owner.steps for output in step.outputs if output.seq_id == "a"] == [
        whole[0],
        whole[-1],
    ]


def test_a_sequence_runs_to_its_end(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.commands.put(AddGroup([1, 2, 3], [Sibling("a", PARAMS, [])]))
    assert owner.tokens_of("a") == undisturbed([1, 2, 3], PARAMS, FACTS, 100)
    owner.end()
    assert [step.num_sequences for step in owner.steps] == [1] * 20
    assert [step.has_prompts for step in owner.steps] == [True] + [False] * 19
    assert all(step.duration_s > 0 for step in owner.steps)


def test_a_step_without_memory_shifts_no_later_steps_figures(tmp_path: Path) -> None:
    owner = Owner(tmp_path, runner=OnceOutOfMemory)
    owner.commands.put(AddGroup(list(range(20)), [Sibling("a", PARAMS, [])]))
    owner.tokens_of("a")
    owner.end()
    assert [step.num_sequences for step in owner.steps[2:]] == [1] * 20
    assert [step.has_prompts for step in owner.steps] == [False, True, True] + [False] * 19


class OnceOutOfMemory(ArithmeticRunner):
    """Has no memory for its first prompt."""

    is_full = True

    def execute(self, plan: StepPlan) -> PendingResult:
        if self.is_full and plan.num_tokens == 20:
            self.is_full = False
            raise OutOfMemory("a step")
        return super().execute(plan)


def test_refused_siblings_all_end(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    siblings = [Sibling("a", PARAMS), Sibling("b", PARAMS, [FACTS.vocab_size])]
    owner.commands.put(AddGroup([1, 2, 3], siblings))
    refused = owner.next_outputs()
    assert [(output.seq_id, output.finish_reason) for output in refused] == [("a", "error"), ("b", "error")]
    owner.commands.put(AddGroup([1, 2, 3], [Sibling("a", PARAMS), Sibling("b", PARAMS)]))
    assert owner.tokens_of("b") == undisturbed([1, 2, 3], PARAMS, FACTS, 100)
    owner.end()


def test_a_sequence_goes_on_where_another_engine_left_it(tmp_path: Path) -> None:
    whole = undisturbed([1, 2, 3], PARAMS, FACTS, 100)
    owner = Owner(tmp_path)
    owner.commands.put(AddGroup([1, 2, 3], [Sibling("a", PARAMS, whole[:7])]))
    assert owner.tokens_of("a") == whole[7:]
    owner.end()


def test_a_refused_sequence_ends_alone(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.commands.put(AddGroup([FACTS.vocab_size], [Sibling("bad", PARAMS, [])]))
    owner.commands.put(AddGroup([1], [Sibling("good", PARAMS, [])]))
    [refused] = owner.next_outputs()
    assert (refused.seq_id, refused.finish_reason) == ("bad", "error")
    assert refused.error is not None
    assert str(FACTS.vocab_size) in refused.error
    assert owner.tokens_of("good") == undisturbed([1], PARAMS, FACTS, 100)
    owner.end()


def test_an_aborted_sequence_has_no_further_output(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    owner.commands.put(AddGroup([1], [Sibling("a", endless, [])]))
    owner.next_outputs()
    owner.commands.put(AbortSequences(["a", "unknown"]))
    owner.commands.put(AddGroup([2], [Sibling("b", PARAMS, [])]))
    assert owner.tokens_of("b") == undisturbed([2], PARAMS, FACTS, 100)
    owner.end()
    of_b = next(place for place, step in enumerate(owner.steps) if step.outputs[0].seq_id == "b")
    assert all(output.seq_id == "b" for step in owner.steps[of_b:] for output in step.outputs)


@pytest.fixture
def slow_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens of a resumed sequence are replayed before each step."""
    monkeypatch.setattr(step_loop, "ADD_LIMIT_S", 0.0)
    for module in (generation, step_loop):
        monkeypatch.setattr(module, "REPLAY_TOKENS", 4)


def test_a_long_resumed_sequence_holds_no_step_up(tmp_path: Path, slow_replay: None) -> None:
    whole = undisturbed([1, 2, 3], replace(PARAMS, max_tokens=70), FACTS, 100)
    owner, endless = Owner(tmp_path), SamplingParams(max_tokens=None, ignore_eos=True)
    owner.commands.put(AddGroup([1], [Sibling("a", endless, [])]))
    owner.next_outputs()
    owner.commands.put(AddGroup([1, 2, 3], [Sibling("b", replace(PARAMS, max_tokens=70), whole[:60])]))
    num_steps, seen = 0, []
    while not seen:
        num_steps += 1
        seen = [output.token_id for output in owner.next_outputs() if output.seq_id == "b"]
    assert (seen, num_steps >= 15) == (whole[60:61], True)
    owner.end()


def test_a_sequence_that_is_aborted_while_it_is_replayed_never_runs(tmp_path: Path, slow_replay: None) -> None:
    owner, endless = Owner(tmp_path), SamplingParams(max_tokens=None, ignore_eos=True)
    owner.commands.put(AddGroup([1, 2, 3], [Sibling("b", endless, [5] * 60)]))
    owner.commands.put(AbortSequences(["b"]))
    owner.commands.put(AddGroup([2], [Sibling("c", PARAMS, [])]))
    assert owner.tokens_of("c") == undisturbed([2], PARAMS, FACTS, 100)
    owner.end()
    assert [step.num_sequences for step in owner.steps] == [1] * 20


def test_an_idle_loop_stops_at_once(tmp_path: Path) -> None:
    owner = Owner(tmp_path)
    owner.end()


def test_a_step_that_a_request_enters_is_reported_before_it_runs(tmp_path: Path) -> None:
    owner = Owner(tmp_path, max_num_batched_tokens=16)
    owner.commands.put(AddGroup(list(range(1, 41)), [Sibling("r/n/0", PARAMS), Sibling("r/n/1", PARAMS)]))
    begun = [owner.next(StepBegun) for _ in range(3)]
    owner.tokens_of("r/n/1")
    owner.end()
    assert isinstance(owner.seen[0], Figures | StepBegun)
    changes = [(each.number, each.entered, each.left, each.waits) for each in begun if isinstance(each, StepBegun)]
    assert changes == [
        (1, frozenset({"r"}), frozenset(), False),
        (2, frozenset(), frozenset(), False),
        (3, frozenset({"r"}), frozenset(), False),
    ]
    remaining = [dict(each.remaining) for each in begun if isinstance(each, StepBegun)]
    assert remaining == [{"r/n/0": 24}, {"r/n/0": 8}, {"r/n/0": 0, "r/n/1": 0}]
    assert sum(isinstance(each, StepBegun) for each in owner.seen) == 3, "steps of decodes are reported once"


def test_a_step_waits_for_the_mark_of_a_request_that_was_claimed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "MARK_LIMIT_S", LIMIT_S)
    owner = Owner(tmp_path)
    owner.commands.put(AddGroup([1], [Sibling("r/n/0", PARAMS)], waits_for_mark=True))
    begun = owner.next(StepBegun)
    assert isinstance(begun, StepBegun)
    assert begun.waits
    with pytest.raises(queue.Empty):
        owner.reports.get(timeout=0.2)
    owner.commands.put(StepMarked(begun.number))
    assert owner.tokens_of("r/n/0") == undisturbed([1], PARAMS, FACTS, 100)
    owner.end()


def test_a_mark_that_does_not_come_holds_a_step_up_no_longer_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "MARK_LIMIT_S", 0.01)
    owner = Owner(tmp_path)
    owner.commands.put(AddGroup([1], [Sibling("r/n/0", PARAMS)], waits_for_mark=True))
    assert owner.tokens_of("r/n/0") == undisturbed([1], PARAMS, FACTS, 100)
    owner.end()


def test_figures_follow_commands_without_a_step_and_come_from_an_idle_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_loop, "IDLE_WAIT_S", 0.02)
    owner = Owner(tmp_path)
    owner.commands.put(AbortSequences(["unknown"]))
    while True:
        figures = owner.next(Figures)
        assert isinstance(figures, Figures)
        if figures.num_commands == 1:
            break
    assert (figures.is_busy, figures.stats.num_running) == (False, 0)
    owner.next(Figures)
    owner.end()
