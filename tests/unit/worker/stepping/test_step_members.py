"""Which sequences are in the running step: reported when one enters, or leaves without an end."""

from pagestream_worker.stepping.step_members import MembershipChange, StepMembers


def update(members: StepMembers, num_requeues: int, *, prefills: str = "", decodes: str = "") -> object:
    return members.update(prefills.split(), decodes.split, num_requeues)


def change(entered: str, left_requests: str = "") -> MembershipChange:
    return MembershipChange(frozenset(entered.split()), frozenset(left_requests.split()))


def test_a_sequence_enters_once_with_its_first_chunk() -> None:
    running = StepMembers()
    assert update(running, 0, prefills="a/1/0") == change("a/1/0")
    assert update(running, 0, prefills="a/1/0") is None
    assert update(running, 0, decodes="a/1/0") is None
    assert update(running, 0, prefills="b/1/0", decodes="a/1/0") == change("b/1/0")


def test_a_preempted_sequence_leaves_and_enters_again() -> None:
    running = StepMembers()
    update(running, 0, prefills="a/1/0 b/1/0 c/1/0")
    assert update(running, 1, decodes="a/1/0 b/1/0") == change("", "c")
    assert update(running, 1, decodes="a/1/0 b/1/0") is None
    assert update(running, 1, prefills="c/1/0", decodes="a/1/0 b/1/0") == change("c/1/0")


def test_a_request_leaves_with_the_last_of_its_sequences() -> None:
    running = StepMembers()
    update(running, 0, prefills="a/1/0 a/1/1 b/1/0")
    assert update(running, 1, decodes="a/1/0 b/1/0") == change("")
    assert update(running, 2, decodes="b/1/0") == change("", "a")


def test_a_sequence_that_ended_does_not_leave() -> None:
    running = StepMembers()
    update(running, 0, prefills="a/1/0 b/1/0 c/1/0")
    running.discard("a/1/0")
    assert update(running, 0, decodes="b/1/0 c/1/0") is None
    assert update(running, 1, decodes="c/1/0") == change("", "b")
