"""The errors that logs end with."""

from pagestream.v1.inference_pb2 import FINISH_REASON_ERROR, FINISH_REASON_STOP
from pagestream.v1.records_pb2 import LogEnd, RequestSpec
from pagestream_streams.admin.unserved import ERROR_CODE, MODEL_UNAVAILABLE
from pagestream_streams.protocol.entries import INVALID_REQUEST
from pagestream_streams.protocol.finish_reasons import finish_reason_name

from pagestream_gateway.errors import GenerationFailed, NoEngine, RequestFailed

_FAILURES = {ERROR_CODE: NoEngine, MODEL_UNAVAILABLE: NoEngine, INVALID_REQUEST: RequestFailed}
"""By the code that the log carries."""


def is_failed(spec: RequestSpec, end: LogEnd) -> bool:
    """Whether a log ended with an error, or before the vectors that were asked for were known."""
    is_cut_short = spec.HasField("pooling") and end.reason != FINISH_REASON_STOP
    return end.reason == FINISH_REASON_ERROR or end.HasField("error") or is_cut_short


def failure(end: LogEnd) -> GenerationFailed:
    """Return the error of a log that ended with one."""
    if not end.error.code:
        reason = finish_reason_name(end.reason)
        return GenerationFailed(reason, f"the request ended before its answer was complete: {reason}")
    kind = _FAILURES.get(end.error.code, GenerationFailed)
    return kind(end.error.code, end.error.message)
