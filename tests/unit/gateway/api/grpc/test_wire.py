import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import ChatInput, ChatMessage, GenerateRequest, SamplingParams
from pagestream_gateway.api.grpc.wire import parse_message
from pagestream_gateway.errors import InvalidRequest


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_typed_error(data: bytes) -> None:
    try:
        expected = GenerateRequest.FromString(data)
    except DecodeError:
        with pytest.raises(InvalidRequest):
            parse_message(GenerateRequest, data)
    else:
        assert parse_message(GenerateRequest, data) == expected or "nan" in str(expected)


MARK = "MARK"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (GenerateRequest(model=MARK, sampling=SamplingParams(temperature=0.5, n=2)), "model"),
        (GenerateRequest(sampling=SamplingParams(temperature=0.5, n=300, stop=["a", MARK])), "sampling.stop"),
        (GenerateRequest(chat=ChatInput(messages=[ChatMessage(role="a", content=MARK)])), "chat.messages.content"),
        (GenerateRequest(prompt="x" * 500, client_request_id=MARK), "client_request_id"),
    ],
)
def test_text_that_is_not_utf8_is_named(message: GenerateRequest, field: str) -> None:
    data = message.SerializeToString().replace(MARK.encode(), b"\xff\xfe\xfd\xfc")
    with pytest.raises(InvalidRequest, match="UTF-8") as caught:
        parse_message(GenerateRequest, data)
    assert caught.value.field == field
