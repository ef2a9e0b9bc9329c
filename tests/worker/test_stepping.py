"""An engine on a thread: what it does with its commands, its reports on the event loop, the ways in which it ends."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from pagestream_engine import Choice, Engine, EngineConfig, SamplingParams, SequenceOutput
from pagestream_engine.wire.worker import AbortSequences, AddGroup, StepBegun, StepMarked, Stop, TokenColumns
from pagestream_worker import EngineThread
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder, undisturbed
from support.processes.waiting import LIMIT_S, until

FACTS = ArithmeticFacts()
PROMPT = [1, 2, 3]
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True)


class Owner:
    """The event loop's side of a thread."""

    def __init__(self, folder: Path, add_limit_s: float, **options: int) -> None:
        def make_engine() -> Engine:
            config = EngineConfig.from_options(options)
            return Engine(make_folder(folder), config, make_runner=lambda _, config: ArithmeticRunner(config, FACTS))

        self.outputs: list[SequenceOutput] = []
        self.columns: list[tuple[int, int]] = []
        self.begun: list[StepBegun] = []
        self.steps: list[int] = []
        self.thread = EngineThread(make_engine, add_limit_s=add_limit_s)
        self.thread.start()
        assert self.thread.loaded.result(LIMIT_S).vocab_size == FACTS.vocab_size
        self.thread.listen(
            on_outputs=self._take, on_begun=self.begun.append, on_step=lambda _, sequences: self.steps.append(sequences)
        )

    def _take(self, outputs: Sequence[SequenceOutput], columns: TokenColumns) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.outputs += outputs
        self.columns += [(log, token_id) for log, token_id, _ in columns.rows()]

    def add(self, seq_id: str, prompt: list[int] = PROMPT, *, then: Sequence[int] = (), log: int = 0) -> None:
        """Add a sequence that goes on after some tokens."""
        self.thread.submit(AddGroup(prompt, [Choice(seq_id, PARAMS, list(then))], log_handle=log))

    async def tokens_of(self, seq_id: str) -> list[int | None]:
        """Wait for a sequence's end, and return its tokens."""

        def own() -> list[SequenceOutput]:
            return [output for output in self.outputs if output.seq_id == seq_id]

        await until(lambda: any(output.finish_reason for output in own()), f"the end of {seq_id}")
        return [output.token_id for output in own()]

    async def ended(self) -> None:
        """Wait for the end, with its error, and for what was reported before."""
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wrap_future(self.thread.ended)
        await asyncio.sleep(0)


@asynccontextmanager
async def running(folder: Path, *, add_limit_s: float = 0.005, **options: int) -> AsyncIterator[Owner]:
    owner = Owner(folder, add_limit_s, **options)
    yield owner
    owner.thread.submit(Stop())
    await owner.ended()


async def test_tokens_and_figures_are_reported(tmp_path: Path) -> None:
    async with running(tmp_path) as owner:
        assert owner.thread.figures.stats.num_running == 0
        owner.add("a")
        assert await owner.tokens_of("a") == undisturbed(PROMPT, PARAMS, FACTS, 100)
        await until(lambda: len(owner.steps) == 20, "all steps")
    assert owner.steps == [1] * 20
    assert owner.thread.figures.stats.num_generated_tokens == 20
    assert owner.thread.step_age_s() == pytest.approx(0.0)


async def test_plain_tokens_of_a_sequence_with_a_log_come_in_columns(tmp_path: Path) -> None:
    """Its first and its last one come whole."""
    whole = undisturbed(PROMPT, PARAMS, FACTS, 100)
    async with running(tmp_path) as owner:
        owner.add("a", log=7)
        assert await owner.tokens_of("a") == [whole[0], whole[-1]]
    assert owner.columns == [(7, token_id) for token_id in whole[1:-1]]


async def test_refused_siblings_all_end_and_others_go_on(tmp_path: Path) -> None:
    async with running(tmp_path) as owner:
        siblings = [Choice("a", PARAMS), Choice("b", PARAMS, [FACTS.vocab_size])]
        owner.thread.submit(AddGroup(PROMPT, siblings))
        owner.add("c", [FACTS.vocab_size])
        owner.add("good")
        assert await owner.tokens_of("good") == undisturbed(PROMPT, PARAMS, FACTS, 100)
    refused = {output.seq_id: output for output in owner.outputs if output.finish_reason == "error"}
    assert refused.keys() == {"a", "b", "c"}
    assert str(FACTS.vocab_size) in str(refused["c"].error)


async def test_a_sequence_goes_on_where_another_engine_left_it(tmp_path: Path) -> None:
    whole = undisturbed(PROMPT, PARAMS, FACTS, 100)
    async with running(tmp_path) as owner:
        owner.add("a", then=whole[:7])
        assert await owner.tokens_of("a") == whole[7:]


async def test_an_aborted_sequence_has_no_further_output(tmp_path: Path) -> None:
    async with running(tmp_path) as owner:
        owner.thread.submit(AddGroup([1], [Choice("a", ENDLESS)]))
        await until(lambda: bool(owner.outputs), "its first token")
        owner.thread.submit(AbortSequences(["a", "unknown"]))
        owner.add("b", [2])
        assert await owner.tokens_of("b") == undisturbed([2], PARAMS, FACTS, 100)
    first = next(place for place, output in enumerate(owner.outputs) if output.seq_id == "b")
    assert {output.seq_id for output in owner.outputs[first:]} == {"b"}


async def test_many_choices_are_added_between_steps(tmp_path: Path) -> None:
    """128 choices with long lists held up the next step of all others for 80 ms."""
    async with running(tmp_path, add_limit_s=0.0) as owner:
        owner.thread.submit(AddGroup([1], [Choice("a", ENDLESS)]))
        await until(lambda: bool(owner.outputs), "its first token")
        num_before = len(owner.outputs)
        owner.thread.submit(AddGroup(PROMPT, [Choice(f"r/n/{number}", PARAMS) for number in range(40)]))
        assert await owner.tokens_of("r/n/39") == undisturbed(PROMPT, PARAMS, FACTS, 100)
        owner.thread.submit(AbortSequences(["a"]))
        await until(lambda: not owner.thread.figures.is_busy, "rest")
    others = [output.seq_id for output in owner.outputs[num_before:]]
    assert others.index("r/n/0") >= 40, "a step for each choice"


async def test_a_step_that_a_request_enters_is_reported_before_it_runs(tmp_path: Path) -> None:
    async with running(tmp_path, max_num_batched_tokens=16) as owner:
        owner.thread.submit(AddGroup(list(range(1, 41)), [Choice("r/n/0", PARAMS), Choice("r/n/1", PARAMS)]))
        await owner.tokens_of("r/n/1")
    changes = [(each.number, each.entered, each.left, each.waits, dict(each.remaining)) for each in owner.begun]
    assert changes == [
        (1, frozenset({"r"}), frozenset(), False, {"r/n/0": 24}),
        (2, frozenset(), frozenset(), False, {"r/n/0": 8}),
        (3, frozenset({"r"}), frozenset(), False, {"r/n/0": 0, "r/n/1": 0}),
    ], "steps of decodes are reported once"


async def test_a_request_leaves_the_steps_with_its_last_sequence(tmp_path: Path) -> None:
    """Of two choices one is preempted, and comes back after the other's end; of two requests one leaves."""
    async with running(tmp_path, block_size=4, num_gpu_blocks_override=8) as owner:
        owner.thread.submit(AddGroup(PROMPT, [Choice("r/n/0", PARAMS), Choice("r/n/1", PARAMS)]))
        await owner.tokens_of("r/n/0")
        await owner.tokens_of("r/n/1")
        assert owner.thread.figures.stats.num_preemptions > 0
        assert not any(each.left for each in owner.begun)
        num_begun = len(owner.begun)
        for number in range(2):
            owner.thread.submit(AddGroup([number + 4] * 3, [Choice(f"{number}/n/0", PARAMS)]))
        await owner.tokens_of("0/n/0")
        await owner.tokens_of("1/n/0")
    assert frozenset({"1"}) in [each.left for each in owner.begun[num_begun:]]


async def test_a_step_waits_for_the_mark_of_a_request_that_was_claimed_before(tmp_path: Path) -> None:
    """And no longer than its limit, so that the order of mark and step is seen where the mark comes at once."""
    async with running(tmp_path) as owner:
        owner.thread.submit(AddGroup([1], [Choice("r/n/0", PARAMS)], waits_for_mark=True))
        await until(lambda: bool(owner.begun), "the step")
        [begun] = owner.begun
        assert begun.waits
        owner.thread.submit(StepMarked(begun.number))
        assert await owner.tokens_of("r/n/0") == undisturbed([1], PARAMS, FACTS, 100)
        owner.thread.submit(AddGroup([2], [Choice("s/n/0", PARAMS)], waits_for_mark=True))
        assert await owner.tokens_of("s/n/0") == undisturbed([2], PARAMS, FACTS, 100), "its mark never comes"


class Panic(BaseException):
    """As pyo3 raises where a library in Rust panics: no Exception."""


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [(MemoryError("no memory"), MemoryError, "no memory"), (Panic("it panicked"), RuntimeError, "Panic: it panicked")],
)
async def test_an_error_that_ends_the_thread_is_the_futures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, kind: type[Exception], words: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    owner = Owner(tmp_path, 0.005)
    monkeypatch.setattr(Engine, "adding", fail)
    owner.add("a")
    with pytest.raises(kind, match=words):
        await owner.ended()


def test_an_error_of_the_load_is_the_futures() -> None:
    def make_engine() -> Engine:
        raise FileNotFoundError("no such model")

    thread = EngineThread(make_engine)
    thread.start()
    with pytest.raises(FileNotFoundError, match="no such model"):
        thread.loaded.result(LIMIT_S)
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="--profile-dir"):
        thread.request_profile(1)
