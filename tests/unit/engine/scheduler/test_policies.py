"""What each policy promises, with an engine whose model adds numbers: order, starvation bounds, equal tokens."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import Sibling
from pagestream_engine.scheduler import policy_registry
from pagestream_engine.scheduler.policies import FairByTenant, PriorityFirst, RoundRobin, ShortestFirst
from pagestream_engine.scheduler.policy import SchedulingPolicy
from support.engines.arithmetic_model import ArithmeticFacts, ArithmeticRunner, make_folder, undisturbed

FACTS = ArithmeticFacts(vocab_size=23)


def make_runner(_: Path, config: EngineConfig) -> ArithmeticRunner:
    return ArithmeticRunner(config, FACTS)


class Run:
    """An engine whose requests are counted by token, step by step."""

    def __init__(self, folder: Path, policy: Callable[[], SchedulingPolicy], *, num_seats: int, ahead: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy_registry, "_registered", {"tested": policy})
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
        """`num_had`: output tokens that another engine has generated; `caller`: as for Engine.adding_group."""
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        prompt = [1 + len(self.tokens) % 20] * num_prompt
        self._expected[name] = undisturbed(prompt, params, FACTS, self.engine.max_model_len)
        self.tokens[name] = self._expected[name][:num_had]
        sibling = Sibling(name, dataclasses.replace(params, seed=0), tuple(self.tokens[name]))
        for _ in self.engine.adding_group(prompt, [sibling], **caller):
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


pytestmark = pytest.mark.parametrize("ahead", [False, True])


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


def test_nobody_but_the_first_class_interrupts(tmp_path: Path, ahead: bool) -> None:
    with run_of(tmp_path, PriorityFirst, num_seats=1, ahead=ahead) as run:
        run.add("low", num_output=20, priority=2)
        run.step()
        run.add("middle", priority=1)
    assert run.ended == ["low", "middle"]


def test_a_lower_class_is_overtaken_by_so_many_and_no_more(tmp_path: Path, ahead: bool) -> None:
    """Whether it waits or runs: a stream of the first class that never ends stops neither."""
    with run_of(tmp_path, lambda: PriorityFirst(class_arrivals=6), num_seats=1, ahead=ahead) as run:
        run.add("low", priority=1, num_output=4)
        for number in range(20):
            run.add(str(number), num_output=3)
    assert run.ended.index("low") == 5


def test_a_class_that_was_risen_by_waiting_elsewhere_counts(tmp_path: Path, ahead: bool) -> None:
    """It is neither passed nor interrupted by what came later."""
    with run_of(tmp_path, PriorityFirst, num_seats=1, ahead=ahead) as run:
        run.add("aged", priority=1, num_output=20, aged_classes=1.0)
        run.add("behind", priority=1, aged_classes=0.99)
        run.step()
        run.add("first", num_output=20)
    assert run.ended == ["aged", "first", "behind"]


def test_the_shortest_goes_first_and_a_long_one_is_overtaken_by_a_bounded_number(tmp_path: Path, ahead: bool) -> None:
    with run_of(tmp_path, lambda: ShortestFirst(token_arrivals=4), num_seats=1, ahead=ahead) as run:
        run.add("running")
        run.step()
        run.add("long", num_prompt=30, num_output=10)
        for number in range(20):
            run.add(str(number), num_prompt=4, num_output=4)
    assert run.ended[:2] == ["running", "0"]
    assert run.ended.index("long") - 1 <= 40 / 4


def test_an_unlimited_request_is_ranked_by_what_such_requests_have_generated(tmp_path: Path, ahead: bool) -> None:
    with run_of(tmp_path, ShortestFirst, num_seats=1, ahead=ahead) as run:
        for number in range(3):
            run.add(f"talks {number}", tenant="talks", num_output=60, num_prompt=6)
            run.add(f"brief {number}", tenant="brief", num_output=2, num_prompt=5)
        run.finish()
        run.add("running", num_output=4)
        run.step()
        run.add("a", tenant="talks", num_output=400, num_prompt=6)
        run.add("b", tenant="brief", num_output=400, num_prompt=5)
    assert run.begun[-2:] == ["b", "a"]


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


def test_one_request_of_a_tenant_passes_the_flood_of_another(tmp_path: Path, ahead: bool) -> None:
    with run_of(tmp_path, FairByTenant, num_seats=1, ahead=ahead) as run:
        for number in range(24):
            run.add(str(number), tenant="flood")
        for _ in range(3):
            run.step()
        run.add("one", tenant="other")
    assert run.ended.index("one") == 1


def test_a_tenant_is_not_charged_what_another_engine_generated(tmp_path: Path, ahead: bool) -> None:
    with run_of(tmp_path, FairByTenant, num_seats=1, ahead=ahead) as run:
        run.add("resumed", tenant="moved", num_output=204, num_had=200)
        run.add("other 0", tenant="other", num_output=40)
        run.finish()
        for number in (1, 2):
            run.add(f"other {number}", tenant="other", num_output=40)
            run.add(f"moved {number}", tenant="moved", num_output=40)
    assert run.begun[2:4] == ["moved 1", "other 1"]


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
