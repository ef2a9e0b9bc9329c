"""Records cross a process border unchanged."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass

import numpy as np
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.step.records import BlockEdits, NewSequence, StepLogprobs, StepPlan, StepResult


def _ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def _assert_same(got: object, expected: object) -> None:
    assert type(got) is type(expected)
    if is_dataclass(expected) and not isinstance(expected, SamplingParams):
        for each in fields(expected):
            _assert_same(getattr(got, each.name), getattr(expected, each.name))
    elif isinstance(expected, np.ndarray):
        assert isinstance(got, np.ndarray)
        np.testing.assert_array_equal(got, expected, strict=True)
    elif isinstance(expected, tuple):
        assert isinstance(got, tuple)
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            _assert_same(one, other)
    else:
        assert got == expected


def test_a_plan_is_the_same_after_pickling() -> None:
    params = SamplingParams(temperature=0.5, logprobs=2, logit_bias={3: 1.5}, stop=["x"])
    added = NewSequence(2, _ints(5, 6, 7), 2, 1, params, -(2**63), (0, 9), (_ints(4, 1), _ints(8)))
    plan = StepPlan(
        step_id=7,
        reset=True,
        removed=_ints(2),
        added=(added,),
        appended=(BlockEdits(_ints(0, 0), _ints(3, 4), _ints(11, 12)), BlockEdits(_ints(), _ints(), _ints())),
        copies=_ints(1, 2).reshape(1, 2),
        rows=_ints(2, 0),
        num_new_tokens=_ints(2, 1),
        num_prefills=1,
        sampled_rows=_ints(2, 5, 0),
        sampled_from=_ints(0, 0, 1),
    )
    _assert_same(pickle.loads(pickle.dumps(plan, protocol=5)), plan)  # noqa: S301 - its own bytes
    assert plan.num_tokens == 3


def test_a_result_is_the_same_after_pickling() -> None:
    logprobs = StepLogprobs(
        _ints(1), _ints(1), _ints(4, 9).reshape(1, 2), np.array([[-1.5, -0.5]], np.float32), _ints(2)
    )
    result = StepResult(7, _ints(3, 4).reshape(2, 1), _ints(1, 1), logprobs, {0: "no such token"})
    _assert_same(pickle.loads(pickle.dumps(result, protocol=5)), result)  # noqa: S301 - its own bytes
