"""What each policy promises, with an engine whose model adds numbers: order, starvation bounds, equal tokens."""

import dataclasses
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pagestream_engine import (
    Choice,
    ConfigError,
    Engine,
    EngineConfig,
    SamplingParams,
    SchedulingPolicy,
    Sequence,
    register_policy,
)
from pagestream_engine.request import Request
from pagestream_engine.scheduler import (
    FairByTenant,
    PriorityFirst,
    RoundRobin,
    ShortestFirst,
    WaitingQueue,
    make_policy,
)
from pagestream_engine.scheduler.policies import LengthPredictor
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder, undisturbed

FACTS = ArithmeticFacts(vocab_size=23)


def make_runner(_: Path, config: EngineConfig) -> ArithmeticRunner:
    return ArithmeticRunner(config, FACTS)


class Run:
    """An engine whose requests are counted by token, step by step."""

    def __init__(self, folder: Path, policy: Callable[[], SchedulingPolicy], *, num_seats: int, ahead: bool) -> None:
        register_policy("tested", policy)
        config = EngineConfig.from_options(
            {
                "max_num_seqs": num_seats,
                "block_size": 4,
                "num_gpu_blocks_override": 512,
                "scheduling_policy": "tested",
                "async_scheduling": ahead,
            }
        )
        self.engine = Engine(make_folder(folder), config, make_runner=make_runner)
        self.tokens: dict[str, list[int]] = {}
        self.begun: list[str] = []
        """In the order of their first tokens."""
        self.ended: list[str] = []
        self._expected: dict[str, list[int]] = {}

    def add(self, name: str, *, num_prompt: int = 5, num_output: int = 8, num_had: int = 0, **caller: Any) -> None:
        """`num_had`: output tokens that another engine has generated; `caller`: as for Engine.adding."""
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        prompt = [1 + len(self.tokens) % 20] * num_prompt
        self._expected[name] = undisturbed(prompt, params, FACTS, self.engine.max_model_len)
        self.tokens[name] = self._expected[name][:num_had]
        sibling = Choice(name, dataclasses.replace(params, seed=0), tuple(self.tokens[name]))
        for _ in self.engine.adding(Request(prompt, [sibling], **caller)):
            pass

    def step(self) -> None:
        """Run one; each request gets the tokens that it gets alone."""
        for output in self.engine.step():
            assert output.token_id is not None
            tokens = self.tokens[output.seq_id]
            if output.seq_id not in self.begun:
                self.begun.append(output.seq_id)
            tokens.append(output.token_id)
            if output.finish_reason is not None:
                assert tokens == self._expected[output.seq_id]
                self.ended.append(output.seq_id)
        self.engine.check_invariants()

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()


@contextmanager
def run_of(folder: Path, policy: Callable[[], SchedulingPolicy], *, num_seats: int, ahead: bool) -> Iterator[Run]:
    run = Run(folder, policy, num_seats=num_seats, ahead=ahead)
    yield run
    run.finish()
    assert set(run.ended) == set(run.tokens)
    assert run.engine.stats().num_free_blocks == 512


with_a_step_in_flight = pytest.mark.parametrize("ahead", [False, True])


@with_a_step_in_flight
def test_a_first_class_request_takes_a_seat_from_the_lowest_class(tmp_path: Path, ahead: bool) -> None:
    with run_of(tmp_path, PriorityFirst, num_seats=2, ahead=ahead) as run:
        run.add("middle", num_output=40, priority=1)
        run.add("low", num_output=40, priority=2)
        for _ in range(6):
            run.step()
        run.add("first", num_output=4)
        for _ in range(2 + 2 * ahead):  # With a step in flight, the displaced one's last token is awaited.
            run.step()
        assert run.tokens["first"]
        seen = {name: len(run.tokens[name]) for name in ("middle", "low")}
        assert run.engine.stats().num_waiting == 1
        while "first" not in run.ended:
            run.step()
        assert len(run.tokens["middle"]) > seen["middle"]
        assert len(run.tokens["low"]) == seen["low"], "the lowest class made room"


@with_a_step_in_flight
def test_nobody_but_the_first_class_interrupts(tmp_path: Path, ahead: bool) -> None:
    with run_of(tmp_path, PriorityFirst, num_seats=1, ahead=ahead) as run:
        run.add("low", num_output=20, priority=2)
        run.step()
        run.add("middle", priority=1)
    assert run.ended == ["low", "middle"]


@with_a_step_in_flight
def test_a_lower_class_is_overtaken_by_so_many_and_no_more(tmp_path: Path, ahead: bool) -> None:
    """Whether it waits or runs: a stream of the first class that never ends stops neither."""
    with run_of(tmp_path, lambda: PriorityFirst(class_arrivals=6), num_seats=1, ahead=ahead) as run:
        run.add("low", priority=1, num_output=4)
        for number in range(20):
            run.add(str(number), num_output=3)
    assert run.ended.index("low") == 5


@with_a_step_in_flight
def test_a_class_that_was_risen_by_waiting_elsewhere_counts(tmp_path: Path, ahead: bool) -> None:
    """It is neither passed nor interrupted by what came later."""
    with run_of(tmp_path, PriorityFirst, num_seats=1, ahead=ahead) as run:
        run.add("aged", priority=1, num_output=20, aged_classes=1.0)
        run.add("behind", priority=1, aged_classes=0.99)
        run.step()
        run.add("first", num_output=20)
    assert run.ended == ["aged", "first", "behind"]


@with_a_step_in_flight
def test_the_shortest_goes_first_and_a_long_one_is_overtaken_by_a_bounded_number(tmp_path: Path, ahead: bool) -> None:
    with run_of(tmp_path, lambda: ShortestFirst(token_arrivals=4), num_seats=1, ahead=ahead) as run:
        run.add("running")
        run.step()
        run.add("long", num_prompt=30, num_output=10)
        for number in range(20):
            run.add(str(number), num_prompt=4, num_output=4)
    assert run.ended[:2] == ["running", "0"]
    assert run.ended.index("long") - 1 <= 40 / 4


@with_a_step_in_flight
def test_an_unlimited_request_is_ranked_by_what_such_requests_have_generated(tmp_path: Path, ahead: bool) -> None:
    with run_of(tmp_path, ShortestFirst, num_seats=1, ahead=ahead) as run:
        for number in range(3):
            run.add(f"talks {number}", tenant="talks", num_output=60, num_prompt=6)
            run.add(f"brief {number}", tenant="brief", num_output=2, num_prompt=5)
        run.finish()
        run.add("running", num_output=4)
        run.step()
        run.add("a", tenant="talks", num_output=120, num_prompt=6)
        run.add("b", tenant="brief", num_output=120, num_prompt=5)
    assert run.begun[-2:] == ["b", "a"]


@with_a_step_in_flight
def test_turns_bound_how_long_anybody_waits(tmp_path: Path, ahead: bool) -> None:
    names, slice_tokens = [str(number) for number in range(5)], 4
    with run_of(tmp_path, lambda: RoundRobin(slice_tokens), num_seats=1, ahead=ahead) as run:
        for name in names:
            run.add(name, num_output=23)
        while len(run.ended) < len(names):
            run.step()
            counts = [len(run.tokens[name]) for name in names if name not in run.ended]
            assert not counts or max(counts) - min(counts) <= slice_tokens + 1 + ahead
    assert run.begun == names


@with_a_step_in_flight
def test_one_request_of_a_tenant_passes_the_flood_of_another(tmp_path: Path, ahead: bool) -> None:
    with run_of(tmp_path, FairByTenant, num_seats=1, ahead=ahead) as run:
        for number in range(24):
            run.add(str(number), tenant="flood")
        for _ in range(3):
            run.step()
        run.add("one", tenant="other")
    assert run.ended.index("one") == 1


@with_a_step_in_flight
def test_a_tenant_is_not_charged_what_another_engine_generated(tmp_path: Path, ahead: bool) -> None:
    with run_of(tmp_path, FairByTenant, num_seats=1, ahead=ahead) as run:
        run.add("resumed", tenant="moved", num_output=204, num_had=200)
        run.add("other 0", tenant="other", num_output=40)
        run.finish()
        for number in (1, 2):
            run.add(f"other {number}", tenant="other", num_output=40)
            run.add(f"moved {number}", tenant="moved", num_output=40)
    assert run.begun[2:4] == ["moved 1", "other 1"]


@with_a_step_in_flight
@pytest.mark.parametrize("is_named", [False, True])
def test_tenants_get_tokens_by_their_weights(tmp_path: Path, ahead: bool, is_named: bool) -> None:
    weights = {"heavy": 2.0} if is_named else {}
    with run_of(tmp_path, lambda: FairByTenant(weights), num_seats=2, ahead=ahead) as run:
        for number in range(30):
            run.add(f"light {number}", tenant="light")
            run.add(f"heavy {number}", tenant="heavy", num_output=4, weight=1.0 if is_named else 2.0)
        while len(run.ended) < 24:
            run.step()
        sums = {
            tenant: sum(5 + len(tokens) for name, tokens in run.tokens.items() if tokens and name.startswith(tenant))
            for tenant in ("light", "heavy")
        }
        assert sums["heavy"] / sums["light"] == pytest.approx(2.0, rel=0.25)


def make_seq(arrival: int) -> Sequence:
    return Sequence(str(arrival), [1], SamplingParams(), seed=0, arrival=arrival, max_total_tokens=9)


def waiting(*seqs: Sequence) -> Request:
    """Make sequences the choices of one request, which all wait."""
    request = seqs[0].request
    request.sequences, request.waiting = list(seqs), list(seqs)
    for seq in seqs:
        seq.request = request
    return request


def test_first_come_first_served_goes_by_arrival() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    for arrival in (3, 1, 2):
        queue.push(waiting(make_seq(arrival)))
    assert [queue.pop().waiting[0].arrival for _ in range(3)] == [1, 2, 3]


def test_what_comes_back_goes_before_what_came_later() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    for arrival in (5, 6):
        queue.push(waiting(make_seq(arrival)))
    queue.push(waiting(make_seq(2)))
    first = queue.peek()
    assert first is not None
    assert first.waiting[0].arrival == 2


def test_a_request_counts_with_all_that_wait_and_goes_by_its_first() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    request = waiting(make_seq(2), make_seq(3), make_seq(4))
    for one in (request, waiting(make_seq(5)), waiting(make_seq(1))):
        queue.push(one)
    assert len(queue) == 5
    assert queue.pop().waiting[0].arrival == 1
    queue.forget(request.waiting[1])
    assert len(queue) == 3
    assert queue.pop() is request
    assert [seq.arrival for seq in request.waiting] == [2, 4]
    assert len(queue) == 1


def test_skips_what_was_aborted_in_the_queue() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    sequences = [make_seq(arrival) for arrival in range(300)]
    for seq in sequences:
        queue.push(waiting(seq))
    for seq in sequences[:299]:
        queue.forget(seq)
    assert len(queue) == 1
    assert [seq.arrival for seq in queue] == [299]
    assert queue.peek() is sequences[299].request
    queue.forget(sequences[299])
    assert queue.peek() is None


@pytest.mark.parametrize("aside", [False, True])
def test_requests_that_were_aborted_behind_the_head_are_freed(aside: bool) -> None:
    """The head, which stays for long, must not keep thousands of them in memory."""
    before = living_requests()
    queue = WaitingQueue(make_policy("fcfs"))
    sequences = [make_seq(arrival) for arrival in range(1000)]
    for seq in sequences:
        queue.push(waiting(seq))
    while aside and not queue.is_all_aside:
        queue.set_aside("lane")
    while len(sequences) > 1:
        queue.forget(sequences.pop())
    assert living_requests() - before < 100
    if aside:
        queue.take_back("lane")
    assert [queue.pop().waiting, queue.peek()] == [sequences, None]


def living_requests() -> int:
    """Count the requests that something refers to; none of them waits for the garbage collector."""
    return sum(type(each) is Request for each in gc.get_objects())


class LastComeFirstServed(SchedulingPolicy):
    def rank(self, seq: Sequence) -> float:
        return -seq.arrival


def test_a_registered_policy_orders_the_queue() -> None:
    register_policy("lcfs", LastComeFirstServed)
    queue = WaitingQueue(make_policy("lcfs"))
    for arrival in (3, 1, 2):
        queue.push(waiting(make_seq(arrival)))
    assert [queue.pop().waiting[0].arrival for _ in range(3)] == [3, 2, 1]


def test_a_policy_that_is_none_is_refused() -> None:
    register_policy("dict", dict)  # type: ignore[arg-type] - what is refused when it is made
    with pytest.raises(ConfigError, match=r"scheduling_policy: given 'random', expected one of fcfs, .*dict.*; a"):
        make_policy("random")
    with pytest.raises(ConfigError, match="expected a SchedulingPolicy from the factory of 'dict'"):
        make_policy("dict")
    with pytest.raises(ConfigError, match="factory: given 'lcfs'"):
        register_policy("lcfs", "lcfs")  # type: ignore[arg-type] - what is refused


SHARED = [5] * 80
"""A prompt of 20 of the 40 blocks."""


def make_engine(folder: Path, num_blocks: int = 40, **options: int) -> Engine:
    return Engine(
        make_folder(folder),
        EngineConfig.from_options(
            {"scheduling_policy": "priority", "block_size": 4, "num_gpu_blocks_override": num_blocks, "max_num_seqs": 8}
            | options
        ),
        make_runner=lambda _, config: ArithmeticRunner(config, ArithmeticFacts(vocab_size=23)),
    )


@pytest.mark.parametrize("step_tokens", [64, 9], ids=["at once", "without a budget for the first step"])
def test_beyond_a_lowered_limit_each_takes_one_place(tmp_path: Path, step_tokens: int) -> None:
    """Eight of four that may run are displaced by what comes first as at a full batch: one for one."""
    engine = make_engine(tmp_path, 400, max_num_batched_tokens=step_tokens)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for number in range(8):
        engine.add_request(f"low {number}", [number + 1, 2, 3, 4, 5], params, priority=1)
    while engine.stats().num_running < 8:
        engine.step()
    engine.set_limits(4)
    for number in range(2):
        engine.add_request(f"high {number}", [9 + number] * 5, params, priority=0)
    begun = {output.seq_id for _ in range(12) for output in engine.step()}
    stats = engine.stats()
    assert (stats.num_displaced, stats.num_running) == (2, 8)
    assert {"high 0", "high 1"} <= begun


def test_nobody_is_displaced_for_blocks_that_others_hold_too(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.add_request("holder", [*SHARED, 1], params, priority=0)
    for _ in range(3):
        engine.step()
    for number in range(4):
        engine.add_request(f"low {number}", [*SHARED, number + 2], params, priority=1)
    while engine.stats().num_running < 5:
        engine.step()
    engine.add_request("big", [7] * 100, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True), priority=0)
    for _ in range(3):
        engine.step()
    assert engine.stats().num_running == 5, "what the low ones hold alone would not make room"
    ended = set()
    while engine.has_unfinished_requests():
        ended |= {output.seq_id for output in engine.step() if output.finish_reason is not None}
    assert len(ended) == 6


def ended(tenant: str, num_prompt: int, num_output: int) -> Sequence:
    return Sequence(
        "s",
        [0] * num_prompt,
        SamplingParams(),
        seed=0,
        arrival=0,
        max_total_tokens=num_prompt + 2000,
        output_token_ids=[0] * num_output,
        request=Request((), (), tenant=tenant),
    )


def test_medians_follow_tenant_and_prompt() -> None:
    predictor = LengthPredictor()
    assert predictor.expected(ended("a", 1000, 0)) == 2000, "all that it may have, while nothing is known"
    for number in range(40):
        predictor.note(ended("a", 1000, 50 + number % 5))
        predictor.note(ended("b", 1000, 500 + number % 5))
        predictor.note(ended("a", 30, 200))
    assert predictor.expected(ended("a", 1010, 0)) == pytest.approx(52, rel=0.4)
    assert predictor.expected(ended("b", 1010, 0)) == pytest.approx(502, rel=0.4)
    assert predictor.expected(ended("a", 30, 0)) == pytest.approx(200, rel=0.2)


def test_tenants_without_end_do_not_fill_memory() -> None:
    predictor, sizes = LengthPredictor(), []
    for first in range(0, 9_000, 3_000):
        for number in range(first, first + 3_000):
            predictor.note(ended(str(number), 1000, 50))
        sizes.append(len(pickle.dumps(predictor)))
    assert sizes[2] == pytest.approx(sizes[1], rel=0.05)
    assert predictor.expected(ended("new", 1000, 0)) == pytest.approx(50, rel=0.1), "what all share is kept"
