import pytest
from pagestream_engine.errors import ConfigError
from pagestream_engine.sampling_params import SamplingParams
from pagestream_engine.scheduler.policy import WaitingQueue, make_policy
from pagestream_engine.sequence import Sequence, SequenceState


def make_seq(arrival: int) -> Sequence:
    return Sequence(str(arrival), [1], SamplingParams(), seed=0, arrival=arrival, max_total_tokens=9)


def test_first_come_first_served_goes_by_arrival() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    for arrival in (3, 1, 2):
        queue.push(make_seq(arrival))
    assert [queue.pop().arrival for _ in range(3)] == [1, 2, 3]


def test_what_comes_back_goes_before_what_came_later() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    for arrival in (5, 6):
        queue.push(make_seq(arrival))
    queue.push(make_seq(2))
    first = queue.peek()
    assert first is not None
    assert first.arrival == 2


def test_skips_what_was_aborted_in_the_queue() -> None:
    queue = WaitingQueue(make_policy("fcfs"))
    sequences = [make_seq(arrival) for arrival in range(300)]
    for seq in sequences:
        queue.push(seq)
    for seq in sequences[:299]:
        seq.state = SequenceState.FINISHED
        queue.forget()
    assert len(queue) == 1
    assert [seq.arrival for seq in queue] == [299]
    assert queue.peek() is sequences[299]
    sequences[299].state = SequenceState.FINISHED
    queue.forget()
    assert queue.peek() is None


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="scheduling_policy: given 'random'"):
        make_policy("random")
