"""Finish reasons: the engine's words and the wire's numbers."""

from enum import StrEnum

from pagestream.v1.inference_pb2 import FinishReason


class FinishName(StrEnum):
    """What the engine calls an end."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


_VALUES = {
    FinishName.STOP: FinishReason.FINISH_REASON_STOP,
    FinishName.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    FinishName.ERROR: FinishReason.FINISH_REASON_ERROR,
}


def finish_value(name: FinishName) -> FinishReason:
    """Return the wire's value of a finish."""
    return _VALUES[name]
