"""From a caller's arguments to the message."""

from typing import Any

import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream_client import InvalidRequest, SamplingOptions
from pagestream_client.grpc.requests import generate_request
from pagestream_client.requests import Input


def made(given: Input = Input(prompt="x"), *, on_disconnect: str = "cancel", **options: Any) -> api.GenerateRequest:  # noqa: B008
    return generate_request(
        "demo",
        given,
        options,  # type: ignore[arg-type]
        idempotency_key=None,
        on_disconnect=on_disconnect,
        priority=1,
        client_request_id="mine",
    )


def test_every_sampling_field_of_the_wire_contract_has_an_option() -> None:
    assert set(SamplingOptions.__annotations__) == set(api.SamplingParams.DESCRIPTOR.fields_by_name)


def test_options_are_written_and_unset_ones_stay_unset() -> None:
    request = made(temperature=0.0, stop="end", stop_token_ids=[3, 4], logit_bias={5: -1.5}, logprobs=0, seed=None)
    sampling = request.sampling
    assert sampling.HasField("temperature")
    assert sampling.HasField("logprobs")
    assert not sampling.HasField("seed")
    assert not sampling.HasField("top_p")
    assert (list(sampling.stop), list(sampling.stop_token_ids), dict(sampling.logit_bias)) == (
        ["end"],
        [3, 4],
        {5: -1.5},
    )
    assert (request.model, request.priority, request.client_request_id) == ("demo", 1, "mine")


def test_each_request_has_a_key_of_its_own() -> None:
    keys = {made().idempotency_key for _ in range(10)}
    assert len(keys) == 10
    assert all(keys)


def test_inputs() -> None:
    assert made(Input(prompt="")).WhichOneof("input") == "prompt"
    assert list(made(Input(prompt_token_ids=[1, 2])).prompt_token_ids.ids) == [1, 2]
    assert made(Input(prompt_token_ids=[])).WhichOneof("input") == "prompt_token_ids"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]
    chat = made(Input(messages=messages, continue_final_message=True)).chat
    assert [(each.role, each.content, each.name) for each in chat.messages] == [("system", "s", ""), ("user", "u", "n")]
    assert chat.continue_final_message


def test_what_happens_without_a_reader() -> None:
    assert made(on_disconnect="continue").on_disconnect == api.ON_DISCONNECT_CONTINUE
    assert made().on_disconnect == api.ON_DISCONNECT_CANCEL


@pytest.mark.parametrize(
    ("field", "given", "options"),
    [
        ("input", {}, {}),
        ("input", {"prompt": "a", "prompt_token_ids": [1]}, {}),
        ("prompt", {"prompt": 7}, {}),
        ("prompt_token_ids", {"prompt_token_ids": [-1]}, {}),
        ("messages.1.tool", {"messages": [{"role": "user"}, {"tool": "x"}]}, {}),
        ("messages.0.content", {"messages": [{"content": None}]}, {}),
        ("temperature", {"prompt": "a"}, {"temperature": "hot"}),
        ("n", {"prompt": "a"}, {"n": -1}),
        ("stop", {"prompt": "a"}, {"stop": [1]}),
        ("logit_bias", {"prompt": "a"}, {"logit_bias": {"a": 1}}),
    ],
)
def test_what_cannot_be_sent_is_named(field: str, given: dict[str, Any], options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(Input(**given), **options)
    assert caught.value.field == field


def test_a_misspelt_option_is_a_mistake_in_the_program() -> None:
    with pytest.raises(TypeError, match="'max_token' is no sampling option"):
        made(max_token=3)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'cancel' or 'continue'"):
        made(on_disconnect="explode")
