import pytest
from pagestream_engine.errors import ConfigError
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import SequenceGroup, TokenSequence
from pagestream_engine.scheduler import policy_registry
from pagestream_engine.scheduler.policy import SchedulingPolicy, WaitingQueue
from pagestream_engine.scheduler.policy_registry import make_policy, register_policy


def make_seq(arrival: int) -> TokenSequence:
    return TokenSequence(str(arrival), [1], SamplingParams(), seed=0, arrival=arrival, max_total_tokens=9)


def test_first_come_first_served_goes_by_arrival() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    for arrival in (3, 1, 2):
        queue.push(make_seq(arrival).group)
    assert [queue.pop().members[0].arrival for _ in range(3)] == [1, 2, 3]


def test_what_comes_back_goes_before_what_came_later() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    for arrival in (5, 6):
        queue.push(make_seq(arrival).group)
    queue.push(make_seq(2).group)
    first = queue.peek()
    assert first is not None
    assert first.members[0].arrival == 2


def test_a_group_counts_with_all_its_sequences_and_goes_by_its_first() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    group = SequenceGroup([make_seq(2), make_seq(3), make_seq(4)])
    for one in (group, make_seq(5).group, make_seq(1).group):
        queue.push(one)
    assert len(queue) == 5
    assert queue.pop().members[0].arrival == 1
    queue.forget(group.members[1])
    assert len(queue) == 3
    assert queue.pop() is group
    assert [seq.arrival for seq in group.members] == [2, 4]
    assert len(queue) == 1


def test_skips_what_was_aborted_in_the_queue() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    sequences = [make_seq(arrival) for arrival in range(300)]
    for seq in sequences:
        queue.push(seq.group)
    for seq in sequences[:299]:
        queue.forget(seq)
    assert len(queue) == 1
    assert [seq.arrival for seq in queue] == [299]
    assert queue.peek() is sequences[299].group
    queue.forget(sequences[299])
    assert queue.peek() is None


class LastComeFirstServed(SchedulingPolicy):
    def rank(self, seq: TokenSequence) -> float:
        return -seq.arrival


def test_a_registered_policy_orders_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_registry, "_registered", {})
    register_policy("lcfs", LastComeFirstServed)
    queue = WaitingQueue(make_policy("lcfs"))
    for arrival in (3, 1, 2):
        queue.push(make_seq(arrival).group)
    assert [queue.pop().members[0].arrival for _ in range(3)] == [3, 2, 1]


def test_a_policy_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_registry, "_registered", {"dict": dict})
    with pytest.raises(ConfigError, match=r"scheduling_policy: given 'random', expected one of fcfs, .*dict; a"):
        make_policy("random")
    with pytest.raises(ConfigError, match="expected a SchedulingPolicy from the factory of 'dict'"):
        make_policy("dict")
    with pytest.raises(ConfigError, match="factory: given 'lcfs'"):
        register_policy("lcfs", "lcfs")  # type: ignore[arg-type] - what is refused
