"""Records on their way to another machine."""

from __future__ import annotations

from pagestream_engine import SamplingParams, StructuredOutputsParams
from pagestream_engine.executor.nodes.codec import decode, encode
from pagestream_engine.request.structured_outputs import ReasoningMarks


def test_a_constraint_arrives_with_its_marks_of_reasoning() -> None:
    marks = ReasoningMarks(end=[8], openings=[[7], [9, 7]])
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}, reasoning=marks))
    assert decode(encode(params)) == params
