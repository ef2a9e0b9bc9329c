"""What records say of a request's size."""

import pytest
from pagestream.v1.inference_pb2 import SamplingParams, TokenIds
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_streams.protocol.records import most_output_tokens, output_bounds


@pytest.mark.parametrize(
    ("total", "bounds", "most"), [(0, [50, 50, 50], 300), (100, [50, 10, 50], 220), (140, [50, 50, 50], 300)]
)
def test_a_prompt_and_its_output_may_be_bounded_together(total: int, bounds: list[int], most: int) -> None:
    prompts = [TokenIds(ids=[1] * length) for length in (1, 90, 40)]
    spec = RequestSpec(prompts=prompts, sampling=SamplingParams(n=2, max_tokens=50), max_total_tokens=total)
    assert output_bounds(spec) == bounds
    assert most_output_tokens(spec) == most


def test_prompts_alone_count_one_token_each() -> None:
    spec = RequestSpec(prompts=[TokenIds(ids=[1])] * 3, sampling=SamplingParams(max_tokens=0))
    assert (output_bounds(spec), most_output_tokens(spec)) == ([0, 0, 0], 3)
