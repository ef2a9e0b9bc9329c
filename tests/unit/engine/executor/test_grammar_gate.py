"""Requests whose grammars are not compiled yet: they wait beside the queue, and leave it by an abort or a limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from pagestream_engine import LLM, SamplingParams, StructuredOutputsParams
from pagestream_engine.engine import Engine
from pagestream_engine.errors import RequestFault
from pagestream_engine.grammar.compiler import GrammarCompiler, Reply
from pagestream_engine.request.grammars import Grammar, PreparedGrammar

DEMO_MODEL = Path(__file__).parents[4] / "deploy" / "demo-model" / "model"
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


@pytest.mark.usefixtures("replies")
def test_a_grammar_that_takes_too_long_ends_its_request(loaded: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded._gate, "_limit_s", -1.0)
    other = StructuredOutputsParams(regex="[cd]{9}")  # what was compiled for the test before is known
    loaded.add_request("late", [5, 6], SamplingParams(structured_outputs=other))
    [output] = loaded.step()
    assert (output.seq_id, output.finish_reason) == ("late", "error")
    assert isinstance(output.error, RequestFault)
    assert "not compiled after" in output.error
    assert not loaded.has_unfinished_requests()
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
