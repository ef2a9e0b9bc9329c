"""Requests whose grammars are not compiled yet, and where the grammar of a request that reasons begins.

They wait beside the queue, and leave it by an abort or a limit.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine import (
    LLM,
    Engine,
    InvariantViolation,
    ReasoningMarks,
    RequestFault,
    SamplingParams,
    SequenceOutput,
    StructuredOutputsParams,
)
from pagestream_engine.features.grammar.compiler import Allowed, GrammarCompiler, Reply
from pagestream_engine.features.grammar.matcher import GrammarWalk, Phase, ReasoningGate
from pagestream_engine.plan import PreparedGrammar
from pagestream_engine.sampling_params import Grammar
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served
DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo-model" / "model"
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=StructuredOutputsParams(regex="[ab]{9}"))
Replies = list[tuple[Grammar, Reply]]


@pytest.fixture(scope="module")
def loaded() -> Engine:
    return LLM(DEMO_MODEL, num_gpu_blocks_override=64, device="cpu").engine


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> Replies:
    """Grammars that wait for a compiler that never gets to them."""
    waiting: Replies = []
    monkeypatch.setattr(GrammarCompiler, "prepare", lambda _, grammar, reply: waiting.append((grammar, reply)))
    return waiting


def test_others_run_while_one_waits_for_its_grammar(loaded: Engine, replies: Replies) -> None:
    loaded.add_request("held", [5, 6], PARAMS)
    loaded.add_request("other", [5, 6], SamplingParams(temperature=0.0, max_tokens=3))
    found = [output.seq_id for _ in range(6) for output in loaded.step()]
    assert found == ["other"] * 3
    assert loaded.stats().num_waiting == 1
    loaded.check_invariants()
    [(grammar, reply)] = replies
    reply(PreparedGrammar(grammar, None))
    text = ""
    while loaded.has_unfinished_requests():
        text += "".join(output.text for output in loaded.step())
    assert text
    assert set(text) <= {"a", "b"}


def test_an_abort_reaches_what_waits_for_its_grammar(loaded: Engine, replies: Replies) -> None:
    loaded.add_request("held", [5, 6], PARAMS)
    assert loaded.step() == []
    loaded.abort_request("held")
    assert not loaded.has_unfinished_requests()
    [(grammar, reply)] = replies
    reply(PreparedGrammar(grammar, None))
    loaded.add_request("other", [5, 6], SamplingParams(temperature=0.0, max_tokens=1))
    assert [output.seq_id for _ in range(2) for output in loaded.step()][:1] == ["other"]
    loaded.check_invariants()


def test_what_was_compiled_while_nobody_waited_for_it_is_known(loaded: Engine, replies: Replies) -> None:
    """Its reply comes while the engine sleeps; more than there are threads, and none could be asked for any more."""
    params = [SamplingParams(structured_outputs=StructuredOutputsParams(regex=f"left {i}")) for i in range(4)]
    for number, each in enumerate(params):
        loaded.add_request(str(number), [5, 6], each)
    assert loaded.step() == []
    for number in range(len(params)):
        loaded.abort_request(str(number))
    for grammar, reply in replies:
        reply(PreparedGrammar(grammar, None))
    loaded.sleep.begin()
    loaded.sleep.end()
    assert not loaded._gate._compiling
    loaded.add_request("again", [5, 6], params[0])
    assert len(replies) == len(params) + 1
    loaded.abort_request("again")
    grammar, reply = replies[-1]
    reply(PreparedGrammar(grammar, None))
    loaded.check_invariants()


def test_a_grammar_that_takes_too_long_ends_its_request(
    loaded: Engine, replies: Replies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded._gate, "_limit_s", -1.0)
    other = StructuredOutputsParams(regex="[cd]{9}")  # what was compiled for the test before is known
    loaded.add_request("late", [5, 6], SamplingParams(structured_outputs=other))
    [output] = loaded.step()
    assert (output.seq_id, output.finish_reason) == ("late", "error")
    assert isinstance(output.error, RequestFault)
    assert "not compiled after" in output.error
    assert not loaded.has_unfinished_requests()
    loaded.check_invariants()
    [(grammar, reply)] = replies
    reply(PreparedGrammar(grammar, None))


def test_what_does_not_end_blames_no_other_request(
    loaded: Engine, replies: Replies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(name: str, regex: str) -> str | None:
        loaded.add_request(name, [5, 6], SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex)))
        return next((output.error for output in loaded.step()), None)

    with monkeypatch.context() as late:
        late.setattr(loaded._gate, "_limit_s", -1.0)
        for name in ("slow", "slower"):
            assert isinstance(ends(name, name), RequestFault)
        assert isinstance(ends("same", "slow"), RequestFault)
    refused = ends("other", "other")
    assert refused is not None
    assert "other requests" in refused
    assert not isinstance(refused, RequestFault)
    assert [grammar.text for grammar, _ in replies if "slow" in grammar.text] == ["slow", "slower"]
    for grammar, reply in [*replies]:
        reply(PreparedGrammar(grammar, None))
    assert ends("after", "after") is None
    grammar, reply = replies[-1]
    assert grammar.text == "after"
    reply(PreparedGrammar(grammar, None))
    loaded.abort_request("after")
    loaded.check_invariants()


def test_a_grammar_has_its_time_from_when_a_thread_begins_with_it(
    loaded: Engine, replies: Replies, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("pagestream_engine.features.grammar.gate.time.monotonic", lambda: now)

    def ends() -> dict[str, str | None]:
        return {output.seq_id: output.error for output in loaded.step() if output.finish_reason == "error"}

    for name in ("long", "longer", "innocent"):
        loaded.add_request(
            name, [5, 6], SamplingParams(structured_outputs=StructuredOutputsParams(regex=f"begun {name}"))
        )
    assert ends() == {}
    now += 19
    grammar, reply = replies[0]
    reply(PreparedGrammar(grammar, None))
    assert ends() == {}, "a thread has become free for the third one"
    now += 2
    late = ends()
    assert list(late) == ["longer"]
    assert isinstance(late["longer"], RequestFault)
    grammar, reply = replies[2]
    reply(PreparedGrammar(grammar, None))
    assert ends() == {}
    grammar, reply = replies[1]
    reply(PreparedGrammar(grammar, None))
    loaded.abort_request("long")
    loaded.abort_request("innocent")
    loaded.check_invariants()


def test_what_waits_has_its_time_when_those_before_it_had_too_much(
    loaded: Engine, replies: Replies, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 2000.0
    monkeypatch.setattr("pagestream_engine.features.grammar.gate.time.monotonic", lambda: now)

    def ends(name: str = "") -> dict[str, str | None]:
        if name:
            constraint = StructuredOutputsParams(regex=f"freed {name}")
            loaded.add_request(name, [5, 6], SamplingParams(structured_outputs=constraint))
        return {output.seq_id: output.error for output in loaded.step() if output.finish_reason == "error"}

    for name in ("stuck", "stuck too", "queued"):
        assert ends(name) == {}
    now += 21
    assert list(ends()) == ["stuck", "stuck too", "queued"]
    grammar, reply = replies[0]
    reply(PreparedGrammar(grammar, None))
    assert ends("next") == {}, "a thread has become free for what waits"
    for grammar, reply in replies[1:]:
        reply(PreparedGrammar(grammar, None))
    loaded.abort_request("next")
    loaded.check_invariants()


def test_the_cache_of_compiled_grammars_is_bounded_and_what_was_evicted_is_compiled_again() -> None:
    compiler = GrammarCompiler(DEMO_MODEL, 1536, [1], cache_bytes=3 << 20)
    grammars = [Grammar("regex", f"a{place}") for place in range(6)]
    for grammar in grammars:
        found = compiler._compile(grammar)
        assert not isinstance(found, RequestFault)
        compiler._keep(grammar, found)
    assert list(compiler._cache) == grammars[-2:]
    assert not compiler.matcher(grammars[0]).is_error()


@pytest.mark.parametrize(
    "grammar",
    [Grammar("json", '{"multipleOf": 9.973}'), Grammar("grammar", 'start: "a" | %json {"multipleOf": 99.73}')],
)
def test_a_divisor_counts_for_the_cache_by_its_remainders(grammar: Grammar) -> None:
    compiler = GrammarCompiler(DEMO_MODEL, 1536, [1])
    found = compiler._compile(grammar)
    assert not isinstance(found, RequestFault)
    compiler._keep(grammar, found)
    assert compiler._num_bytes > 9973 * 400
    compiler.unshared_matcher(grammar)
    assert compiler._num_bytes == 0


def test_what_is_there_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(DEMO_MODEL, 1536, [1])
    grammar = Grammar("regex", "[ab]{9}")
    found = compiler._compile(grammar)
    assert not isinstance(found, RequestFault)
    compiler._keep(grammar, found)
    monkeypatch.setattr("pagestream_engine.features.grammar.compiler.NUM_THREADS", 0)
    done: list[PreparedGrammar] = []
    compiler.prepare(grammar, done.append)
    assert done == [PreparedGrammar(grammar, None)]


# -- masks that take long ---------------------------------------------------------------------------------------------


def run_until(engine: Engine, seq_id: str, num_tokens: int) -> dict[str, list[SequenceOutput]]:
    """Step until a sequence has so many tokens, or has ended. Return all outputs by sequence."""
    outputs: dict[str, list[SequenceOutput]] = {}
    while len(own := outputs.get(seq_id, [])) < num_tokens and not (own and own[-1].finish_reason):
        for output in engine.step():
            outputs.setdefault(output.seq_id, []).append(output)
    return outputs


@pytest.fixture
def slow_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
    """Call it with a regex: masks of this test's outputs that have begun come when the event is set.

    A job of the test before may still be under way: it is of another regex.
    """
    held: dict[str, threading.Event] = {}
    advance = GrammarWalk.advance

    def wait_and_advance(walk: GrammarWalk, token_ids: Sequence[int]) -> Allowed:
        if walk._grammar.text in held:
            held[walk._grammar.text].wait(LIMIT_S)
        return advance(walk, token_ids)

    monkeypatch.setattr(GrammarWalk, "advance", wait_and_advance)
    yield lambda regex: held.setdefault(regex, threading.Event())
    for event in held.values():
        event.set()


def in_grammar(regex: str, **fields: Any) -> SamplingParams:
    constraint = StructuredOutputsParams(regex=regex)
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 30, **fields}, structured_outputs=constraint)


def test_a_row_without_its_mask_holds_up_nobody(loaded: Engine, slow_masks: Callable[[str], threading.Event]) -> None:
    before = loaded.stats().num_late_masks
    may_come = slow_masks("a[ab]{9}")
    loaded.add_request("slow", [5, 6], in_grammar("a[ab]{9}"))
    loaded.add_request("quick", [5, 6], in_grammar("[cd]{3}[ef]{9}"))
    loaded.add_request("free", [5, 6], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    outputs = run_until(loaded, "free", 40)
    assert len(outputs["slow"]) == 1, "the mask of its first token is known since its grammar was compiled"
    assert outputs["quick"][-1].finish_reason == "stop"
    assert loaded.stats().num_late_masks - before > 10
    may_come.set()
    outputs["slow"] += run_until(loaded, "slow", 30)["slow"]
    assert re.fullmatch("a[ab]{9}", "".join(output.text for output in outputs["slow"]))
    loaded.check_invariants()


def test_a_row_without_its_mask_can_be_aborted(loaded: Engine, slow_masks: Callable[[str], threading.Event]) -> None:
    may_come = slow_masks("a[ab]{8}")
    loaded.add_request("slow", [5, 6], in_grammar("a[ab]{8}"))
    run_until(loaded, "slow", 1)
    loaded.step()
    loaded.abort_request("slow")
    loaded.add_request("next", [5, 6], in_grammar("[cd]{3}"))
    assert run_until(loaded, "next", 30)["next"][-1].finish_reason == "stop"
    may_come.set()
    loaded.check_invariants()


def agree_by(engine: Engine, agree: Callable[[Sequence[float]], Sequence[float]], patch: pytest.MonkeyPatch) -> None:
    """Have an engine sample as a rank that is not the first one does, which `agree` gives the first one's numbers."""
    engine.add_request("before", [5, 6], SamplingParams(max_tokens=1))  # the first plan of all makes the sampler anew
    run_until(engine, "before", 1)
    patch.setattr(engine._steps.executor._runner._sampling, "_agree", agree)


def test_a_rank_waits_for_the_masks_that_the_first_one_has(
    loaded: Engine, slow_masks: Callable[[str], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_come = slow_masks("a[bc]{7}")
    asked: list[Sequence[float]] = []

    def first_has_all(numbers: Sequence[float]) -> Sequence[float]:
        asked.append(numbers)
        if 1.0 in numbers:
            threading.Timer(0.05, may_come.set).start()
        return [0.0] * len(numbers)

    agree_by(loaded, first_has_all, monkeypatch)
    loaded.add_request("late", [5, 6], in_grammar("a[bc]{7}"))
    outputs = run_until(loaded, "late", 30)["late"]
    assert [1.0] in asked, "no mask was late here"
    assert re.fullmatch("a[bc]{7}", "".join(output.text for output in outputs))


def test_a_rank_that_stays_behind_the_first_one_fails_its_step(
    slow_masks: Callable[[str], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLM(DEMO_MODEL, num_gpu_blocks_override=64, device="cpu").engine  # it has ended after this
    slow_masks("a[bd]{7}")
    monkeypatch.setattr("pagestream_engine.features.grammar.sampling._BEHIND_LIMIT_S", 0.05)
    agree_by(engine, lambda numbers: [0.0] * len(numbers), monkeypatch)
    engine.add_request("late", [5, 6], in_grammar("a[bd]{7}"))
    with pytest.raises(InvariantViolation, match=r"first rank has are not computed here within 0\.05 s"):
        run_until(engine, "late", 30)


def test_masks_that_take_long_again_and_again_end_their_request(
    loaded: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU time is charged, so that a machine that is busy otherwise ends nothing."""
    monkeypatch.setattr("pagestream_engine.features.grammar.matcher.MOST_OVER_S", 0.001)
    loaded.add_request("long", [5, 6], in_grammar(f"x{'ab' * 20_000}[ab]|y[ab]{{9}}", logit_bias={94: 100.0}))
    loaded.add_request("free", [5, 6], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    outputs: dict[str, list[SequenceOutput]] = {"long": [], "free": []}
    while not all(own and own[-1].finish_reason for own in outputs.values()):  # either may be the first that ends
        for output in loaded.step():
            outputs[output.seq_id].append(output)
    error = outputs["long"][-1].error
    assert isinstance(error, RequestFault)
    assert "masks took 0.001 s more than the 20 ms that each has; simplify it" in error
    assert outputs["free"][-1].finish_reason == "length"
    loaded.check_invariants()


def test_a_forced_text_is_found_once(loaded: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    advance = GrammarWalk.advance

    def noted(walk: GrammarWalk, token_ids: Sequence[int]) -> Allowed:
        if walk._grammar.text.startswith(text):
            taken.append(len(token_ids))
        return advance(walk, token_ids)

    monkeypatch.setattr(GrammarWalk, "advance", noted)
    text = "The quick brown fox jumps over the lazy dog " * 10
    loaded.add_request("forced", [5, 6], in_grammar(f"{text}[ab]{{3}}", max_tokens=400))
    outputs = run_until(loaded, "forced", 400)["forced"]
    assert "".join(output.text for output in outputs)[:-3] == text
    assert len(outputs) > 100
    assert len(taken) < 8, "no mask was computed within it"
    assert len(outputs) - 1 <= sum(taken), "and all tokens were taken, the last one if the row lived so long"


# -- where a grammar begins -------------------------------------------------------------------------------------------

OPEN, END, NEWLINE = 7, 8, 9
OPENED = ReasoningMarks(end=[END])
MAY_BEGIN = ReasoningMarks(end=[END], openings=[[OPEN], [NEWLINE, OPEN]])
OF_SEVERAL = ReasoningMarks(end=[1, 1, 2], openings=[[1, 2]])


def grammar_start(marks: ReasoningMarks | None, token_ids: Sequence[int]) -> int | None:
    """Return the place of the grammar's first token; None where it has not come."""
    gate = ReasoningGate(marks)
    taken = [gate.take(token_id) for token_id in token_ids]
    assert taken == sorted(taken)
    return taken.index(True) if True in taken else None


@pytest.mark.parametrize(
    ("marks", "token_ids", "start"),
    [
        (None, [1], 0),
        (OPENED, [1, 2, END, END, 3], 3),
        (OPENED, [OPEN, 2], None),
        (MAY_BEGIN, [1, OPEN, END], 0),
        (MAY_BEGIN, [END, 1], 0),
        (MAY_BEGIN, [OPEN, END, 1], 2),
        (MAY_BEGIN, [NEWLINE, OPEN, 1, END, 2], 4),
        (MAY_BEGIN, [NEWLINE, 1], 1),
        (OF_SEVERAL, [1, 2, 1, 1, 2, 5], 5),
        (OF_SEVERAL, [1, 2, 1, 1, 1, 2, 5], 6),
        (OF_SEVERAL, [1, 2, 1, 2], None),
    ],
)
def test_where_the_grammar_begins(marks: ReasoningMarks | None, token_ids: list[int], start: int | None) -> None:
    assert grammar_start(marks, token_ids) == start


def test_what_an_opening_may_have_next() -> None:
    gate = ReasoningGate(MAY_BEGIN)
    assert (gate.phase, gate.expected()) == (Phase.BEGIN, [OPEN, NEWLINE])
    gate.take(NEWLINE)
    assert (gate.phase, gate.expected()) == (Phase.OPENING, [OPEN])
    gate.take(OPEN)
    assert (gate.phase, gate.expected()) == (Phase.REASONING, [])


@given(st.lists(st.sampled_from([1, 2, OPEN, END, NEWLINE])), st.sampled_from([OPENED, MAY_BEGIN, OF_SEVERAL]))
def test_looking_ahead_changes_nothing(token_ids: list[int], marks: ReasoningMarks) -> None:
    gate = ReasoningGate(marks)
    taken = []
    for place, token_id in enumerate(token_ids):
        ahead = gate.ahead()
        for later in token_ids[place:]:
            ahead.take(later)
        taken.append(gate.take(token_id))
    assert (taken.index(True) if True in taken else None) == grammar_start(marks, token_ids)
