from hypothesis import given
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import FINISH_REASON_STOP
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry
from pagestream_gateway.api.runs import split_runs

ENTRY = st.tuples(st.integers(0, 2), st.booleans())


def entry(number: int, choice: int, finishes: bool) -> LogEntry:
    if finishes:
        return LogEntry(choice=choice, digest=f"d{number}", text="!", finish=ChoiceFinish(reason=FINISH_REASON_STOP))
    return LogEntry(choice=choice, digest=f"d{number}", text=f"{number} ", token_id=number)


@given(st.integers(0, 1000), st.lists(ENTRY, max_size=30), st.booleans())
def test_runs_are_the_entries_in_order(first_index: int, kinds: list[tuple[int, bool]], ends: bool) -> None:
    entries = [entry(number, *kind) for number, kind in enumerate(kinds)]
    if ends:
        entries.append(LogEntry(digest="end", end=LogEnd(reason=FINISH_REASON_STOP)))
    runs = split_runs(first_index, entries)
    seen = first_index
    for run in runs:
        covered = entries[seen - first_index : run.next_index - first_index]
        assert covered
        assert run.digest == covered[-1].digest
        if run.end is not None:
            assert len(covered) == 1
        else:
            assert {each.choice for each in covered} == {run.choice}
            assert run.text == "".join(each.text for each in covered)
            assert run.token_ids == [each.token_id for each in covered if each.HasField("token_id")]
            assert [each.HasField("finish") for each in covered[:-1]] == [False] * (len(covered) - 1)
            assert (run.finish is not None) == covered[-1].HasField("finish")
        seen = run.next_index
    assert seen == first_index + len(entries)


def test_neighbours_of_one_choice_are_one_run() -> None:
    runs = split_runs(4, [entry(0, 1, False), entry(1, 1, False), entry(2, 1, True), entry(3, 0, False)])
    assert [(run.choice, run.text, run.next_index) for run in runs] == [(1, "0 1 !", 7), (0, "3 ", 8)]
