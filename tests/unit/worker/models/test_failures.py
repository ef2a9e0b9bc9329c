"""Models that can't be loaded: what may pass is tried again, ever later; what can't waits for an operator."""

import pytest
from pagestream_engine.errors import EngineError, ModelFileError, ModelNotFound, UnsupportedModel
from pagestream_worker.models.failures import FIRST_DELAY_S, MOST_DELAY_S, Failures
from pagestream_worker.stepping.loading import is_permanent


def test_what_may_pass_is_tried_again_ever_later() -> None:
    now_s = [0.0]
    failures = Failures(lambda: now_s[0])
    delays = []
    for _ in range(10):
        failures.note("a", "the hub is away", 1, is_permanent=False)
        began_s = now_s[0]
        while failures.postponed:
            assert failures.postponed == ("a",)
            now_s[0] += 1.0
        delays.append(now_s[0] - began_s)
    assert delays[0] == FIRST_DELAY_S
    assert delays[1] == 2 * FIRST_DELAY_S
    assert delays[-1] == MOST_DELAY_S
    assert not failures.permanent


def test_what_can_not_pass_waits_for_an_operator() -> None:
    failures = Failures()
    failures.note("a", "it is cut off", 10, is_permanent=True)
    assert not failures.forget_before("a", 10)
    assert failures.permanent == {"a": "it is cut off"}
    assert failures.forget_before("a", 11)
    assert not failures.permanent


@pytest.mark.parametrize(
    ("error", "cause", "expected"),
    [
        (UnsupportedModel("it has a layer that is not known"), None, True),
        (ModelNotFound("nowhere", "a folder"), None, True),
        (ModelNotFound("some/repository", "one that can be reached"), ConnectionError("the hub is away"), False),
        (ModelFileError("config.json: malformed"), ValueError("no JSON"), True),
        (ModelFileError("config.json: unreadable"), OSError(5, "Input/output error"), False),
        (EngineError("a rank has died"), None, False),
    ],
    ids=str,
)
def test_only_files_and_options_are_at_fault_for_good(
    error: EngineError, cause: Exception | None, expected: bool
) -> None:
    error.__cause__ = cause
    assert is_permanent(error) == expected
