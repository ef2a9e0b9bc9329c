"""The engine's sampling parameters of a wire message."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from pagestream.v1.inference_pb2 import EARLY_STOPPING_NEVER, Choices, SamplingParams, StructuredOutputs
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_engine import InvalidRequest
from pagestream_engine.sampling_params import ReasoningMarks, StructuredOutputsParams, child_seed
from pagestream_engine.sampling_params import SamplingParams as EngineParams
from pagestream_grammars import Grammar
from pagestream_worker import child_of, sampling_of, sampling_of_child


def params_of(message: SamplingParams, child: int = 0) -> EngineParams:
    return sampling_of_child(sampling_of(RequestSpec(sampling=message)), child)


def test_a_message_becomes_parameters() -> None:
    message = SamplingParams(
        temperature=0.7, top_k=5, seed=3, stop=["x"], stop_token_ids=[9], min_tokens=1, max_tokens=4
    )
    params = params_of(message)
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.7, 5, 3, 4)
    assert params.stop_strings == ("x",)
    assert params.stop_token_ids == (9,)
    assert params.skip_special_tokens


def test_an_unset_field_has_the_engine_default() -> None:
    assert params_of(SamplingParams(seed=1)).temperature == 1.0


def test_what_the_engine_lacks_is_refused_by_name() -> None:
    spec = RequestSpec(pooling={"kind": 9})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="pooling: given kind 9"):
        sampling_of(spec)


def test_the_features_of_a_request_reach_the_engine() -> None:
    message = SamplingParams(
        seed=1,
        n=2,
        best_of=2,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.5,
        logit_bias={3: 2.0},
        min_tokens=2,
        logprobs=0,
    )
    params = params_of(message, 1)
    assert (params.n, params.best_of, params.seed) == (1, None, child_seed(1, 1))
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.25, 1.5)
    assert (params.logit_bias, params.min_tokens, params.logprobs) == ({3: 2.0}, 2, 0)


def test_the_choices_of_best_of_have_their_prompts_seed() -> None:
    message = SamplingParams(seed=5, n=2, best_of=3)
    found = [params_of(message, sibling) for sibling in range(4)]
    assert [(params.n, params.best_of) for params in found] == [(1, 3)] * 4
    assert [params.seed for params in found] == [5, 5, child_seed(5, 2), child_seed(5, 2)]


def test_a_beam_search_reaches_the_engine() -> None:
    message = SamplingParams(
        seed=5, n=2, use_beam_search=True, beam_width=4, length_penalty=0.5, early_stopping=EARLY_STOPPING_NEVER
    )
    params = params_of(message, 1)
    assert (params.use_beam_search, params.n, params.width) == (True, 1, 4)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")


def test_the_marks_of_reasoning_reach_the_engine() -> None:
    spec = RequestSpec(sampling=SamplingParams(n=2))
    spec.reasoning.end.ids.append(8)
    spec.reasoning.openings.add(ids=[9, 7])
    assert sampling_of(spec).structured_outputs is None
    spec.sampling.structured_outputs.regex = "a"
    constraint = sampling_of(spec).structured_outputs
    assert constraint is not None
    assert constraint.reasoning == ReasoningMarks((8,), ((9, 7),))
    assert params_of(spec.sampling, 1).structured_outputs != constraint


def test_prompts_share_a_clients_seed_and_siblings_never_do() -> None:
    own, chosen = (
        RequestSpec(sampling=SamplingParams(n=2), seed_for_each_prompt=for_each) for for_each in (False, True)
    )
    assert [child_of(own, choice) for choice in range(4)] == [0, 1, 0, 1]
    assert [child_of(chosen, choice) for choice in range(4)] == [0, 1, 2, 3]


OTHER_VALUES = {
    FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    FieldDescriptor.CPPTYPE_INT32: 2,
    FieldDescriptor.CPPTYPE_INT64: 2,
    FieldDescriptor.CPPTYPE_UINT32: 2,
    FieldDescriptor.CPPTYPE_STRING: "x",
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_ENUM: EARLY_STOPPING_NEVER,
}
SPLIT_BEFORE = {"n", "best_of"}
"""Fields that say how many sequences there are, not how one of them is sampled."""


@pytest.mark.parametrize("name", sorted(set(SamplingParams.DESCRIPTOR.fields_by_name) - SPLIT_BEFORE))
def test_no_field_of_the_message_is_ignored(name: str) -> None:
    message = SamplingParams(seed=1, temperature=1.0, max_tokens=8)
    usual = params_of(message)
    field = SamplingParams.DESCRIPTOR.fields_by_name[name]
    if name == "logit_bias":
        message.logit_bias[3] = 2.0
    elif name == "structured_outputs":
        message.structured_outputs.regex = "a"
    elif isinstance(getattr(message, name), Sequence) and not isinstance(getattr(message, name), str):
        getattr(message, name).append(OTHER_VALUES[field.cpp_type])
    else:
        setattr(message, name, name != "skip_special_tokens" and OTHER_VALUES[field.cpp_type])
    try:
        changed = params_of(message)
    except InvalidRequest as error:
        assert name in str(error)  # noqa: PT017 - a field that the engine lacks is refused by its name
    else:
        assert changed != usual


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json": '{"type": "null"}'}, Grammar("json", '{"type":"null"}')),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"choice": Choices(texts=["a", "é"])}, Grammar("choice", '["a", "é"]')),
        ({"grammar": "start: x"}, Grammar("grammar", "start: x")),
        ({"json_object": True, "disable_any_whitespace": True}, Grammar("compact_json", '{"type":"object"}')),
    ],
)
def test_each_constraint_has_its_grammar(given: dict[str, Any], expected: Grammar) -> None:
    message = SamplingParams(structured_outputs=StructuredOutputs(**given))
    constraint = params_of(message).structured_outputs
    assert constraint is not None
    assert constraint.compiled_from == expected


def test_an_unknown_end_of_a_search_is_refused() -> None:
    message = SamplingParams(use_beam_search=True, early_stopping=9)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="early_stopping: given 9"):
        params_of(message)


@pytest.mark.parametrize("given", [{}, {"best_of": 9}, {"use_beam_search": True, "beam_width": 9}])
def test_choices_are_checked_once_together(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    num_checks = Counter[str]()
    for checked in (EngineParams, StructuredOutputsParams, ReasoningMarks):
        check = checked.__post_init__
        monkeypatch.setattr(
            checked, "__post_init__", lambda self, check=check: (num_checks.update([type(self).__name__]), check(self))
        )
    spec = RequestSpec(sampling=SamplingParams(n=8, seed=3, presence_penalty=0.0, temperature=1.0, **given))
    if not given:
        spec.sampling.structured_outputs.regex = "a"
        spec.sampling.allowed_token_ids.extend(range(99))
        spec.reasoning.end.ids.append(8)
    of_all = sampling_of(spec)
    once = num_checks.copy()
    found = [sampling_of_child(of_all, child) for child in range(16)]
    assert num_checks == once
    assert set(once.values()) == {1}
    assert [replace(params) for params in found] == found, "each would pass the checks, which would change nothing"
    first = [child - child % 8 for child in range(16)] if "best_of" in given else range(16)
    assert [params.seed for params in found] == [child_seed(3, child) for child in first]
    assert {(params.n, params.width) for params in found} == {(1, 9 if given else 1)}
