"""What a worker reads from its engine's reports: figures, the age of a step, profiles."""

from dataclasses import fields, replace
from math import inf

import pytest
from pagestream_engine import StepOutput
from pagestream_engine.request.outputs import EngineStats
from pagestream_worker.logs.token_columns import NO_TOKENS, TokenColumns
from pagestream_worker.stepping.commands import AbortSequences, Stop
from pagestream_worker.stepping.engine_core import ReportReader
from pagestream_worker.stepping.reports import Figures, OutputsEnded, ProfileAnswer, Refused, StepBegun, StepDone

STATS = EngineStats(**dict.fromkeys((field.name for field in fields(EngineStats)), 0))
IDLE = Figures(STATS, 0.0, None, num_commands=0, is_busy=False)
BUSY = replace(IDLE, is_busy=True)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time on time.monotonic(), to be set."""
    now = [100.0]
    monkeypatch.setattr("pagestream_worker.stepping.engine_core.time.monotonic", lambda: now[0])
    return now


def test_an_engine_with_work_ages_until_its_next_report(now: list[float]) -> None:
    reader = ReportReader()
    reader.take(BUSY)
    now[0] += 3.0
    assert reader.step_age_s() == pytest.approx(3.0)
    reader.take(StepDone([], 3.0, 1, has_prompts=False, figures=BUSY))
    assert reader.step_age_s() == pytest.approx(0.0)
    now[0] += 2.0
    reader.take(StepDone([], 2.0, 1, has_prompts=False, figures=IDLE))
    now[0] += 2.0
    assert reader.step_age_s() == pytest.approx(0.0)


def test_a_command_that_is_not_executed_ages(now: list[float]) -> None:
    """A process that is stopped, or hangs while it adds a request, is as dead as one whose step does not end."""
    reader = ReportReader()
    reader.note_command(Stop())
    assert reader.step_age_s() == pytest.approx(0.0)
    reader.note_command(AbortSequences(["a"]))
    now[0] += 5.0
    reader.take(IDLE)  # from before the command
    now[0] += 1.0
    assert reader.step_age_s() == pytest.approx(1.0)
    reader.take(replace(IDLE, num_commands=1))
    assert reader.step_age_s() == pytest.approx(0.0)


def test_callbacks_get_what_is_theirs() -> None:
    reader, seen = ReportReader(), list[object]()
    reader.listen(
        lambda outputs, tokens: seen.append((outputs, tokens)),
        seen.append,
        lambda duration_s, sequences: seen.append((duration_s, sequences)),
        lambda: seen.append("ended"),
    )
    tokens = TokenColumns.of([7], [1], ["x"])
    output, begun = StepOutput("a/1/0", 5, "x"), StepBegun(1, frozenset("a"), frozenset(), {}, False, BUSY)
    reader.take(begun)
    reader.take(StepDone([output], 0.5, 3, has_prompts=False, figures=BUSY))
    assert reader.last_prefill_step_s == inf
    reader.take(StepDone([], 0.25, 2, has_prompts=True, figures=BUSY))
    reader.take(StepDone([], 0.5, 0, has_prompts=False, figures=BUSY, tokens=tokens))
    reader.take(Refused([output]))
    reader.take(OutputsEnded())
    assert seen[:-1] == [begun, (0.5, 3), ([output], NO_TOKENS), (0.25, 2), ([], tokens), ([output], NO_TOKENS)]
    assert seen[-1] == "ended"
    assert (reader.last_prefill_step_s, reader.figures) == (0.25, BUSY)


def test_profiles_are_answered_in_order_and_by_the_end() -> None:
    reader = ReportReader()
    first, second, third = (reader.expect_profile() for _ in range(3))
    reader.take(ProfileAnswer(path="/p"))
    reader.take(ProfileAnswer(error="one runs"))
    reader.end()
    assert first.result(0) == "/p"
    with pytest.raises(RuntimeError, match="one runs"):
        second.result(0)
    with pytest.raises(RuntimeError, match="has ended"):
        third.result(0)
