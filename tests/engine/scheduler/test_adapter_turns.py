"""Groups whose adapters find no place let others pass, for a while; and what is read, kept and evicted for them."""

from __future__ import annotations

import pytest
from pagestream_engine import AdapterConfig, SamplingParams, SchedulerConfig, Sequence
from pagestream_engine.kv_cache import BlockPool, CacheManager
from pagestream_engine.plan import LoadedAdapter, full_attention
from pagestream_engine.request import Adapter, Request, SequenceState
from pagestream_engine.scheduler import PASS_LIMIT, AdapterResidency, Scheduler, make_policy


def adapter(name: str) -> Adapter:
    return Adapter(name, f"/{name}", name)


class Harness:
    """A scheduler whose executor has read an adapter before the next step, unless told otherwise."""

    def __init__(self, *, max_loras: int = 1, max_cpu_loras: int = 4, max_num_seqs: int = 8) -> None:
        cache = CacheManager(BlockPool(256), full_attention(4), enable_prefix_caching=False)
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64)
        adapters = AdapterConfig(enable_lora=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
        self.scheduler = Scheduler(config, cache, make_policy("fcfs"), adapters=adapters)
        self.reads = True
        self.arrivals = 0
        self.loads: list[tuple[str, str | None]] = []

    def add(self, name: str | None) -> Sequence:
        given = None if name is None else adapter(name)
        number = self.arrivals
        seq = Sequence(
            str(number),
            [1, 2],
            SamplingParams(),
            seed=0,
            arrival=number,
            max_total_tokens=99,
            request=Request((), (), adapter=given),
        )
        self.arrivals += 1
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[str | None]:
        """Run a step; return the adapters of the sequences that it computes."""
        step = self.scheduler.schedule()
        for load in self.scheduler.residency.take_loads():
            self.loads.append((load.adapter.name, load.evicted))
            if self.reads:
                self.scheduler.residency.note(LoadedAdapter(load.adapter.revision, None))
        self.scheduler.update_after_schedule(step)
        self.scheduler.update_from_output(step, [(7,)] * len(step.sampled()))
        return [entry.seq.adapter_revision for entry in (*step.prefills, *step.decodes)]

    def end(self, *seqs: Sequence) -> None:
        self.scheduler.finish_requests(seqs)


def test_what_finds_no_place_lets_others_pass() -> None:
    """More distinct adapters than places at the head of the queue, and behind them one that runs, and none."""
    harness = Harness()
    first = harness.add("a")
    harness.step()
    assert harness.step() == ["a"]
    waiting = [harness.add(name) for name in ("b", "c", "a", None)]
    assert harness.step() == ["a", None, "a"]
    assert [seq.state for seq in waiting[:2]] == [SequenceState.WAITING] * 2
    assert harness.scheduler.num_waiting == 2
    harness.end(first, waiting[2])
    harness.step()
    assert sorted(map(str, harness.step())) == ["None", "b"]
    harness.scheduler.abort(waiting[1])
    assert not harness.scheduler.num_waiting


@pytest.mark.parametrize("ranks_ahead", [False, True])
def test_a_set_aside_adapter_is_passed_a_bounded_number_of_times(ranks_ahead: bool) -> None:
    """An adapter in use gets a new request whenever one ends: without a bound the other one would wait for ever."""
    harness = Harness(max_num_seqs=4)
    if ranks_ahead:
        harness.arrivals = 10_000
    running = harness.add("a")
    harness.step()
    harness.step()
    waiting = harness.add("b")
    if ranks_ahead:
        harness.arrivals = 1
    num_passed = 0
    while waiting.state is SequenceState.WAITING and num_passed < 2 * PASS_LIMIT:
        following = harness.add("a")
        harness.step()
        num_passed += following.state is SequenceState.RUNNING
        harness.end(running)
        running = following
        if following.state is SequenceState.WAITING:
            harness.step()
            harness.step()
    assert num_passed == (2 * PASS_LIMIT if ranks_ahead else PASS_LIMIT)


def test_others_run_while_an_adapter_is_read() -> None:
    harness = Harness(max_loras=2)
    harness.reads = False
    harness.add("slow")
    harness.add(None)
    assert harness.step() == [None]
    assert not harness.scheduler.waits_for_adapters
    assert harness.step() == [None]
    harness.scheduler.residency.note(LoadedAdapter("slow", None))
    assert sorted(map(str, harness.step())) == ["None", "slow"]


def test_what_runs_is_not_evicted_and_what_was_used_last_stays_longest() -> None:
    harness = Harness(max_loras=2, max_cpu_loras=3)
    a = harness.add("a")
    b = harness.add("b")
    harness.step()
    harness.step()
    c = harness.add("c")
    harness.end(a, b)
    harness.step()
    assert harness.step() == ["c"]
    assert harness.loads == [("a", None), ("b", None), ("c", None)]
    again = harness.add("a")
    harness.step()
    harness.end(c, again)
    d = harness.add("d")
    harness.step()
    harness.step()
    assert harness.loads[3:] == [("d", "b")]
    assert d.state is SequenceState.RUNNING


def test_a_place_that_is_being_read_into_is_waited_for() -> None:
    residency = AdapterResidency(2)
    residency.read_ahead(adapter("a"))
    residency.read_ahead(adapter("b"))
    residency.read_ahead(adapter("c"))
    assert [load.adapter.name for load in residency.take_loads()] == ["a", "b"]
    assert not residency.begin(adapter("c"), kept={"a"})
    residency.note(LoadedAdapter("a", None))
    assert not residency.begin(adapter("c"), kept={"a"})
    residency.note(LoadedAdapter("b", "gone"))
    assert residency.begin(adapter("c"), kept={"a"})
    assert [(load.adapter.name, load.evicted) for load in residency.take_loads()] == [("c", None)]
    assert residency.take_failed() == [LoadedAdapter("b", "gone")]
