"""The items of a response, of runs that hold a token each."""

import pytest
from pagestream.v1.inference_pb2 import LogprobEntry, SamplingParams, TokenLogprobs
from pagestream.v1.records_pb2 import AnswerForm, OutputForm, RequestSpec
from pagestream_gateway.api.openai.logprobs import ChatLogprobs
from pagestream_gateway.api.openai.responses.output import ResponseOutput
from pagestream_gateway.api.runs import Run

TEXTS = ("<think>", "Hm", ".", "</think>", "Yes", "!")


@pytest.mark.parametrize("hides", [False, True])
def test_reasoning_that_is_left_out_is_counted_and_leaves_no_log_probabilities(hides: bool) -> None:
    form = OutputForm(reasoning_format="think", hides_reasoning=hides)
    spec = RequestSpec(request_id="r", sampling=SamplingParams(logprobs=0), answer=AnswerForm(output=form))
    output = ResponseOutput(spec, ChatLogprobs(spec))
    for number, text in enumerate(TEXTS, 1):
        logprobs = [TokenLogprobs(entries=[LogprobEntry(token_id=number, logprob=-1.0, text=text)])]
        output.feed(Run(0, number, "d", text, [number], logprobs))
    output.end()
    assert [item["type"] for item in output.items] == (["message"] if hides else ["reasoning", "message"])
    part = output.items[-1]["content"][0]
    assert part["text"] == "Yes!"
    assert [each["token"] for each in part["logprobs"]] == ["Yes", "!"]
    assert output.num_reasoning_tokens == 4
