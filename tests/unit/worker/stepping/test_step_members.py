"""Which sequences are in the running step: reported when one enters, or leaves without an end."""

from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import Sequence
from pagestream_engine.scheduler.base import ScheduledSequence, ScheduledStep
from pagestream_worker.stepping.step_members import MembershipChange, StepMembers


def seq(name: str) -> Sequence:
    return Sequence(name, [1, 2], SamplingParams(), seed=0, arrival=0, max_total_tokens=9)


def step(*, prefills: str = "", decodes: str = "") -> ScheduledStep:
    return ScheduledStep(
        prefills=[ScheduledSequence(seq(name), 1, needs_sample=True) for name in prefills],
        decodes=[ScheduledSequence(seq(name), 1, needs_sample=True) for name in decodes],
    )


def change(entered: str, left: str, members: str) -> MembershipChange:
    return MembershipChange(frozenset(entered), frozenset(left), frozenset(members))


def test_a_sequence_enters_once_with_its_first_chunk() -> None:
    running = StepMembers()
    assert running.update(step(prefills="a"), 0) == change("a", "", "a")
    assert running.update(step(prefills="a"), 0) is None
    assert running.update(step(decodes="a"), 0) is None
    assert running.update(step(prefills="b", decodes="a"), 0) == change("b", "", "ab")


def test_siblings_enter_together() -> None:
    first = ScheduledSequence(seq("a"), 1, needs_sample=True, siblings=(seq("b"), seq("c")))
    assert StepMembers().update(ScheduledStep(prefills=[first]), 0) == change("abc", "", "abc")


def test_a_preempted_sequence_leaves_and_enters_again() -> None:
    running = StepMembers()
    running.update(step(prefills="abc"), 0)
    assert running.update(step(decodes="ab"), 1) == change("", "c", "ab")
    assert running.update(step(decodes="ab"), 1) is None
    assert running.update(step(prefills="c", decodes="ab"), 1) == change("c", "", "abc")


def test_a_sequence_that_ended_does_not_leave() -> None:
    running = StepMembers()
    running.update(step(prefills="abc"), 0)
    running.discard("a")
    assert running.update(step(decodes="bc"), 0) is None
    assert running.update(step(decodes="c"), 1) == change("", "b", "c")
