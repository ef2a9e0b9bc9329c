"""The table of sampling parameters against the message, and what it leaves to others."""

from pagestream.v1.inference_pb2 import SamplingParams
from pagestream_gateway.api.openai.chat_completions import ChatBody
from pagestream_gateway.api.openai.completions import CompletionBody
from pagestream_gateway.core.sampling.parameters import PARAMETER_NAMES, PARAMETERS, UNSUPPORTED
from pagestream_worker.card import SAMPLING_DEFAULTS


def test_each_field_of_the_message_has_one_entry() -> None:
    assert sorted(parameter.name for parameter in PARAMETERS) == sorted(SamplingParams.DESCRIPTOR.fields_by_name)


def test_each_supported_parameter_is_a_field_of_both_bodies() -> None:
    supported = PARAMETER_NAMES - UNSUPPORTED.keys()
    assert supported <= CompletionBody.model_fields.keys()
    assert supported <= ChatBody.model_fields.keys()


def test_unsupported_parameters_are_fields_of_no_body() -> None:
    assert not UNSUPPORTED.keys() & (CompletionBody.model_fields.keys() | ChatBody.model_fields.keys())


def test_what_a_card_has_is_a_default() -> None:
    assert {*SAMPLING_DEFAULTS} <= {parameter.name for parameter in PARAMETERS if parameter.has_model_default}
