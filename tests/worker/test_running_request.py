"""A running request writes the same log whether it ran in one go or was taken over in the middle."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import FinishReason, SamplingParams, TokenIds
from pagestream.v1.records_pb2 import LogEntry, RequestSpec
from pagestream_engine import InvalidRequest
from pagestream_engine.request import Choice, SequenceOutput, TokenLogprob
from pagestream_engine.sampling_params import child_seed
from pagestream_streams import Claim
from pagestream_streams.protocol import ClaimedLog, chain, to_log_entry
from pagestream_worker import PART_BYTES, PythonLogs, RunningRequest

PROMPTS = ([1, 2, 3], [4, 5])


def running(taken: Claim) -> RunningRequest:
    return RunningRequest(taken, PythonLogs(1_000_000))


def claim(entries: list[LogEntry] | None = None, *, n: int = 1, num_prompts: int = 1, nonce: str = "a") -> Claim:
    spec = RequestSpec(
        request_id="r",
        prompts=[TokenIds(ids=ids) for ids in PROMPTS[:num_prompts]],
        sampling=SamplingParams(n=n, seed=7, max_tokens=5, temperature=0.5),
    )
    log = entries or []
    return Claim(
        spec=spec,
        epoch=1,
        nonce=nonce,
        next_index=len(log),
        digest=log[-1].digest if log else "",
        cached_tokens=0,
        attempts=1,
        deadline=None,
        log=ClaimedLog.of(log),
    )


def open_choices(request: RunningRequest) -> list[Choice]:
    """Begin a request; return what the engine runs of it, with their places among all of its choices."""
    groups = list(request.open_groups())
    return [replace(each, index=first + (each.index or 0)) for first, group in groups for each in group.choices]


def is_plain(request: RunningRequest) -> bool:
    return all(group.log_handle for _, group in request.open_groups())


def play(request: RunningRequest, script: list[tuple[int, SequenceOutput]]) -> list[LogEntry]:
    for choice, output in script:
        request.add_output(choice, output)
    return sent(request)


def sent(request: RunningRequest, limit: int = 100) -> list[LogEntry]:
    entries: list[LogEntry] = []
    while request.log.has_pending:
        append = request.pending(limit)
        entries.extend(map(to_log_entry, append.entries))
        request.log.acknowledge(append.first_index + len(append.entries))
    return entries


def step(token: int, text: str, finish: str | None = None, cached: int = 0) -> SequenceOutput:
    return SequenceOutput("", token_id=token, text=text, finish_reason=finish, num_cached_tokens=cached)


SCRIPT = [
    (0, step(10, "a", cached=2)),
    (1, step(20, "x")),
    (0, step(11, "b")),
    (1, step(21, "y", "length")),
    (0, step(12, "", "stop")),
]


def test_a_log_has_each_token_the_finishes_and_one_end() -> None:
    request = running(claim(n=2))
    assert [choice.index for choice in open_choices(request)] == [0, 1]
    log = play(request, SCRIPT)
    kinds = [entry.WhichOneof("body") for entry in log]
    assert kinds == ["token_id", "token_id", "token_id", "token_id", "finish", "token_id", "finish", "end"]
    assert [entry.token_id for entry in log if entry.WhichOneof("body") == "token_id"] == [10, 20, 11, 21, 12]
    end = log[-1].end
    assert (end.usage.prompt_tokens, end.usage.completion_tokens, end.usage.cached_tokens) == (3, 5, 2)
    assert end.reason == FinishReason.FINISH_REASON_STOP
    assert request.is_complete


@pytest.mark.parametrize(("most", "total", "expected"), [(5, 0, [5, 5]), (5, 7, [4, 5]), (None, 0, [16, 16])])
def test_each_prompt_has_its_own_room(most: int | None, total: int, expected: list[int]) -> None:
    taken = claim(num_prompts=2)
    taken.spec.max_total_tokens = total
    if most is None:  # of a record that does not say: the engine's default
        taken.spec.sampling.ClearField("max_tokens")
    assert [choice.params.max_tokens for choice in open_choices(running(taken))] == expected


def test_the_digest_is_chained_over_the_log() -> None:
    request = running(claim(n=2))
    open_choices(request)
    digest = ""
    for entry in play(request, SCRIPT):
        expected = chain(digest, entry)
        assert entry.digest == expected
        digest = expected


@given(cut=st.integers(0, len(SCRIPT)))
def test_a_successor_writes_what_was_missing(cut: int) -> None:
    whole = running(claim(n=2))
    open_choices(whole)
    expected = play(whole, SCRIPT)

    first = running(claim(n=2))
    open_choices(first)
    written = play(first, SCRIPT[:cut])
    second = running(claim(list(written), n=2, nonce="b"))
    resumed = {choice.index: list(choice.output_token_ids) for choice in open_choices(second)}
    for choice, tokens in resumed.items():
        assert tokens == [output.token_id for index, output in SCRIPT[:cut] if index == choice]
    rest = play(second, SCRIPT[cut:])

    def without_cached(log: list[LogEntry]) -> list[bytes]:
        copies = [LogEntry.FromString(entry.SerializeToString()) for entry in log]
        for copy in copies:
            copy.end.usage.ClearField("cached_tokens") if copy.HasField("end") else None
        return [copy.SerializeToString() for copy in copies]

    assert without_cached(written + rest) == without_cached(expected)


@pytest.mark.parametrize("first", [0, 1])
def test_siblings_take_turns_in_any_order_of_generation_after_a_resume(first: int) -> None:
    whole = play(running(claim(n=2)), SCRIPT)
    successor = running(claim(whole[:2], n=2, nonce="b"))
    rest = sorted(SCRIPT[2:], key=lambda each: each[0] != first)
    assert [entry.digest for entry in play(successor, rest)] == [entry.digest for entry in whole[2:]]


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_successor_of_siblings_writes_the_same_log_wherever_an_append_was_cut(limit: int) -> None:
    """A choice's last token without its finish would give its turn to the others."""
    whole = play(running(claim(n=2)), SCRIPT)
    request = running(claim(n=2))
    for choice, output in SCRIPT:
        request.add_output(choice, output)
    written: list[LogEntry] = []
    while True:
        append = request.pending(limit)
        assert len(append.entries) <= limit + 1
        written += map(to_log_entry, append.entries)
        request.log.acknowledge(len(written))
        if written[-1].HasField("end"):
            break
        tokens = [sum(entry.HasField("token_id") and entry.choice == choice for entry in written) for choice in (0, 1)]
        made = [[each for each in SCRIPT if each[0] == choice][tokens[choice] :] for choice in (0, 1)]
        finished = {entry.choice for entry in written if entry.HasField("finish")}
        successor = running(claim(list(written), n=2, nonce="b"))
        # What ran on goes first now; a choice without its finish is computed until it has it.
        rest = [each for choice in (1, 0) if choice not in finished for each in made[choice]]
        successor.end_if_complete()
        assert [entry.digest for entry in written + play(successor, rest)] == [entry.digest for entry in whole]


def test_a_gap_is_sent_again_from_where_the_log_says() -> None:
    request = running(claim(n=2))
    open_choices(request)
    log = play(request, SCRIPT)
    request.log.acknowledge(3)
    assert request.log.can_send_from(3)
    assert not request.log.can_send_from(len(log) + 1)
    assert not request.is_complete
    assert sent(request, limit=2) == log[3:]


def test_what_another_engine_wrote_before_cannot_be_sent_again() -> None:
    first = running(claim(n=2))
    open_choices(first)
    log = play(first, SCRIPT[:3])
    assert not running(claim(log, n=2)).log.can_send_from(1)


def test_an_error_ends_every_choice_and_names_the_sequences_that_still_run() -> None:
    request = running(claim(n=2))
    seq_ids = [choice.seq_id for choice in open_choices(request)]
    request.add_output(0, SequenceOutput("", token_id=None, text="", finish_reason="error", error="broken"))
    log = sent(request)
    assert [entry.choice for entry in log if entry.HasField("finish")] == [0, 1]
    assert log[-1].end.error.message == "broken"
    assert request.running_seq_ids() == [seq_ids[1]]


def test_an_error_that_quotes_half_a_surrogate_pair_can_be_appended() -> None:
    request = running(claim())
    open_choices(request)
    log = play(request, [(0, SequenceOutput("", None, "", "error", error="no such file: caf\udce9"))])
    assert log[-1].end.error.message == "no such file: caf?"


def test_cached_tokens_count_once_where_a_sequence_fails_after_its_first_token() -> None:
    request = running(claim())
    open_choices(request)
    failed = SequenceOutput("", None, "", "error", num_cached_tokens=2, error="broken")
    log = play(request, [(0, step(10, "a", cached=2)), (0, failed)])
    assert log[-1].end.usage.cached_tokens == 2


def test_a_predecessor_that_died_before_the_end_leaves_only_the_end_to_write() -> None:
    first = running(claim())
    open_choices(first)
    log = play(first, [(0, step(1, "a", "stop"))])
    assert log[-1].HasField("end")
    second = running(claim(log[:-1]))
    assert open_choices(second) == []
    second.end_if_complete()
    assert sent(second) == log[-1:]


def test_two_claims_of_one_request_have_different_sequences() -> None:
    first, second = running(claim(nonce="a")), running(claim(nonce="b"))
    assert {choice.seq_id for choice in open_choices(first)}.isdisjoint(c.seq_id for c in open_choices(second))


def test_each_prompt_of_a_list_has_its_own_choices() -> None:
    request = running(claim(n=2, num_prompts=2))
    choices = open_choices(request)
    assert [group.prompt_token_ids for _, group in request.open_groups()] == [[1, 2, 3], [4, 5]]
    assert choices[0].params.seed == choices[2].params.seed == 7
    assert choices[1].params.seed == choices[3].params.seed != 7


def test_prompts_of_a_list_have_seeds_of_their_own_where_the_client_gave_none() -> None:
    """Equal prompts would have equal answers. The record says it: what began by the other rule goes on by it."""
    drawn = claim(n=2, num_prompts=2)
    drawn.spec.seed_for_each_prompt = True
    seeds = [choice.params.seed for choice in open_choices(running(drawn))]
    assert seeds == [child_seed(7, choice) for choice in range(4)]
    assert len(set(seeds)) == 4


def test_a_refused_request_has_no_sequence_to_abort() -> None:
    taken = claim(n=2)
    taken.spec.sampling.temperature = -1.0
    request = running(taken)
    with pytest.raises(InvalidRequest):
        open_choices(request)
    request.fail("unsupported", "logprobs")
    assert request.running_seq_ids() == []


def test_log_probabilities_are_in_the_tokens_entry_alone() -> None:
    request = running(claim())
    open_choices(request)
    tokens = (TokenLogprob(11, -1.5, 2, "b"), TokenLogprob(10, -0.5, 1, "a"))
    output = SequenceOutput("", token_id=11, text="b", finish_reason="length", logprobs=tokens)
    token, finish, end = play(request, [(0, output)])
    assert [(e.token_id, e.logprob, e.rank, e.text) for e in token.logprobs.entries] == list(tokens)
    assert not finish.HasField("logprobs")
    assert not end.HasField("logprobs")


def test_the_choices_of_a_prompt_come_together_and_only_those_that_are_open() -> None:
    whole = running(claim(n=2, num_prompts=2))
    groups = list(whole.open_groups())
    assert [(first, [each.index for each in group.choices]) for first, group in groups] == [(0, [0, 1]), (2, [0, 1])]
    assert [group.prompt_token_ids for _, group in groups] == [list(prompt) for prompt in PROMPTS]
    log = play(whole, [(0, step(10, "a", "stop")), (2, step(20, "x")), (3, step(21, "y", "length"))])
    second = running(claim(log, n=2, num_prompts=2, nonce="b"))
    resumed = [(choice.index, list(choice.output_token_ids)) for choice in open_choices(second)]
    assert resumed == [(1, []), (2, [20])]


def test_what_comes_at_the_end_is_not_written_as_plain_tokens() -> None:
    """The engine reports plain tokens by sequence, and which of them are the answer is known at the end."""
    one = claim()
    assert is_plain(running(one))
    one.spec.sampling.use_beam_search, one.spec.sampling.temperature = True, 0.0
    assert not is_plain(running(one))
    contest = claim()
    contest.spec.sampling.best_of = 3
    assert not is_plain(running(contest))


def prompt_rows(count: int) -> tuple[tuple[TokenLogprob, ...], ...]:
    return tuple((TokenLogprob(number, -1.0, 1, "x" * 100),) for number in range(count))


def test_prompt_parts_are_bounded_and_go_on_where_a_killed_engine_left_them() -> None:
    """Whatever engine writes them, the log has each token of the prompt once, and the same digests."""
    rows = prompt_rows(200)
    taken = claim(n=2)
    taken.spec.prompts[0].ids[:] = range(201)
    taken.spec.sampling.prompt_logprobs = 0
    script = [(1, SequenceOutput("", None, "", prompt_logprobs=rows)), *SCRIPT]
    whole = play(running(taken), script)
    parts = [entry.prompt_part for entry in whole if entry.HasField("prompt_part")]
    assert [row.entries[0].token_id for part in parts for row in part.logprobs] == list(range(200))
    assert parts[-1].end == 200
    assert len(parts) > 2
    assert max(part.ByteSize() for part in parts) < PART_BYTES + 400
    for cut in range(1, len(parts) + 1):
        second = claim(whole[:cut], n=2, nonce="b")
        second.spec.CopyFrom(taken.spec)
        request = running(second)
        wanted = {choice.params.prompt_logprobs for choice in open_choices(request)}
        assert wanted == ({0} if cut < len(parts) else {None})
        assert whole[:cut] + play(request, script if cut < len(parts) else SCRIPT) == whole


def test_a_vector_that_the_log_has_is_not_computed_again() -> None:
    taken = claim(num_prompts=2)
    taken.spec.pooling.normalize = True
    taken.spec.sampling.max_tokens = 0
    vector = np.array([3.0, 4.0], "<f4").tobytes()
    script = [(choice, SequenceOutput("", None, "", "stop", num_cached_tokens=1, pooled=vector)) for choice in (0, 1)]
    request = running(taken)
    assert {choice.params.pooling for choice in open_choices(request)} == {"last"}
    whole = play(request, script)
    assert [entry.WhichOneof("body") for entry in whole] == ["prompt_part", "finish", "prompt_part", "finish", "end"]
    assert np.frombuffer(whole[0].prompt_part.embedding, "<f4").tolist() == pytest.approx([0.6, 0.8])
    assert (whole[-1].end.usage.completion_tokens, whole[-1].end.usage.cached_tokens) == (0, 2)
    second = claim(whole[:1], num_prompts=2, nonce="b")
    second.spec.CopyFrom(taken.spec)
    request = running(second)
    assert [choice.index for choice in open_choices(request)] == [1]
    assert [entry.digest for entry in whole[:1] + play(request, script[1:])] == [entry.digest for entry in whole]
