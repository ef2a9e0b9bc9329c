"""The errors that logs end with."""

import re

from pagestream.v1.inference_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP, RequestError
from pagestream.v1.records_pb2 import LogEnd, RequestSpec
from pagestream_streams.admin.sweeper import MODEL_UNAVAILABLE, NO_ENGINE
from pagestream_streams.protocol.records import INVALID_REQUEST, finish_reason_name

from pagestream_gateway.core.sampling.parameters import PARAMETER_NAMES
from pagestream_gateway.errors import GenerationFailed, NoEngine, RequestFailed

_FAILURES = {NO_ENGINE: NoEngine, MODEL_UNAVAILABLE: NoEngine}
"""By the code that the log carries."""
_AT_FAULT = re.compile(r"([a-z_]+(?:, [a-z_]+)*): ")
"""With what an engine begins the message of a request that is at fault: names of sampling parameters."""
_CONSTRAINT = "structured_outputs"
LOG_CODES = {
    "engine_error": "An engine failed on the request, or could not read it.",
    INVALID_REQUEST: "An engine found the request at fault.",
    NO_ENGINE: "No engine has served its model for long.",
    MODEL_UNAVAILABLE: "No engine that lists its model can load it.",
    "model_removed": "Its model was removed while it waited.",
    "quarantined": "It made engines hang or die, and is kept for operators.",
    "corrupt_record": "What Redis has of it can't be read.",
}
"""Codes with which the log of an accepted request may end, and what each means."""


def is_failed(spec: RequestSpec, end: LogEnd) -> bool:
    """Whether a log ended with an error, or before the vectors that were asked for were known."""
    is_cut_short = spec.HasField("pooling") and end.reason != FINISH_REASON_STOP
    return end.reason == FINISH_REASON_ERROR or end.HasField("error") or is_cut_short


def failure(spec: RequestSpec, end: LogEnd) -> GenerationFailed:
    """Return the error of a log that ended with one. Fields that it names are named as in the request's body."""
    code, message = end.error.code, end.error.message
    if not code:
        reason = finish_reason_name(end.reason)
        return GenerationFailed(reason, f"the request ended before its answer was complete: {reason}")
    if code != INVALID_REQUEST:
        return _FAILURES.get(code, GenerationFailed)(code, message)
    names = fields_at_fault(end.error)
    if not names:
        return RequestFailed(code, message)
    own_names = [spec.answer.constraint_field or name if name == _CONSTRAINT else name for name in names]
    return RequestFailed(code, f"{', '.join(own_names)}: {message.partition(': ')[2]}", own_names[0])


def fields_at_fault(error: RequestError) -> list[str]:
    """Return the sampling parameters that a request failed of; empty where the error names none."""
    found = _AT_FAULT.match(error.message) if error.code == INVALID_REQUEST else None
    names = found[1].split(", ") if found else []
    return names if PARAMETER_NAMES.issuperset(names) else []
