"""Records as bytes that another machine may send: a JSON tree, then the arrays. Nothing but known records is made of
them, and no code is run, as `pickle` would."""

from __future__ import annotations

import json
import struct
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pagestream_engine.errors import EngineError, NodeProtocolError, RequestFault
from pagestream_engine.executor.base import ExecutorFacts
from pagestream_engine.executor.child import Failure
from pagestream_engine.executor.preparations import SleepChange, SleepChanged
from pagestream_engine.plan import (
    AdapterLoad,
    BlockEdits,
    HostMemory,
    KVGroup,
    KVLayout,
    KVSpec,
    LoadedAdapter,
    NewSequence,
    PreparedGrammar,
    StepLogprobs,
    StepPlan,
    StepPooled,
    StepPromptLogprobs,
    StepResult,
)
from pagestream_engine.request import Adapter
from pagestream_engine.sampling_params import Grammar, ReasoningMarks, SamplingParams, StructuredOutputsParams

_RECORDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Adapter,
        AdapterLoad,
        BlockEdits,
        ExecutorFacts,
        Grammar,
        HostMemory,
        KVGroup,
        KVLayout,
        KVSpec,
        LoadedAdapter,
        NewSequence,
        PreparedGrammar,
        ReasoningMarks,
        RequestFault,
        SamplingParams,
        SleepChange,
        SleepChanged,
        StepLogprobs,
        StepPlan,
        StepPooled,
        StepPromptLogprobs,
        StepResult,
        StructuredOutputsParams,
    )
}
_PARTS = {
    name: tuple(field.name for field in fields(kind) if field.init) if is_dataclass(kind) else ()
    for name, kind in _RECORDS.items()
}
SCHEMA = sorted(_PARTS.items())
"""Records and the order of their parts, which both sides have to share."""
_DTYPES = ("bool", "int32", "int64", "float32", "uint8")
_HEADER = struct.Struct(">I")


def encode(record: object) -> bytes:
    """Return a record as bytes: length of the tree, the tree, and the arrays one after another.

    Raises:
        NodeProtocolError: it has a part that is not one of the known kinds.
    """
    arrays: list[npt.NDArray[Any]] = []
    tree = json.dumps(_tree(record, arrays), separators=(",", ":")).encode()
    return b"".join((_HEADER.pack(len(tree)), tree, *(array.tobytes() for array in arrays)))


def decode(body: bytes) -> Any:
    """Return the record of `encode`'s bytes.

    Raises:
        NodeProtocolError: they are not such bytes.
    """
    try:
        (size,) = _HEADER.unpack_from(body)
        start = _HEADER.size + size
        return _Decoder(body, start).record(json.loads(body[_HEADER.size : start]))
    except (ValueError, TypeError, KeyError, IndexError, struct.error, RecursionError) as error:
        raise NodeProtocolError(f"a record can't be read: {type(error).__name__}: {error}") from error


def _tree(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:  # noqa: PLR0911 - one for each kind
    """Return what JSON can hold: scalars as they are, all else as a list that begins with its kind."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    name = type(value).__name__
    match value:
        case np.ndarray():
            if value.dtype.name not in _DTYPES:
                raise NodeProtocolError(f"an array of {value.dtype}: expected one of {', '.join(_DTYPES)}")
            arrays.append(value)
            return ["array", value.dtype.name, list(value.shape)]
        case np.generic():
            return value.item()
        case RequestFault():
            return ["record", name, [str(value)]]
        case Failure():
            return ["failure", value.step_id, *_described(value.error)]
        case _ if _RECORDS.get(name) is type(value):
            parts = value if isinstance(value, tuple) else [getattr(value, part) for part in _PARTS[name]]
            return ["record", name, [_tree(part, arrays) for part in parts]]
        case dict():
            return ["dict", [[_tree(key, arrays), _tree(part, arrays)] for key, part in value.items()]]
        case tuple() | list() | frozenset():
            return [name, [_tree(part, arrays) for part in value]]
    raise NodeProtocolError(f"{name} can't be sent to another machine")


def _described(error: BaseException) -> tuple[bool, str]:
    if isinstance(error, EngineError):
        return True, str(error)
    return False, f"{type(error).__name__}: {error}"


class _Decoder:
    """Makes records of a tree, and takes the arrays in their order."""

    def __init__(self, body: bytes, start: int) -> None:
        self._body, self._place = body, start

    def record(self, tree: Any) -> Any:  # noqa: PLR0911 - one for each kind
        """Return what a part of the tree stands for."""
        if not isinstance(tree, list):
            return tree
        kind, *parts = tree
        match kind:
            case "array":
                return self._array(*parts)
            case "record":
                name, values = parts
                return _RECORDS[name](*map(self.record, values))
            case "failure":
                step_id, is_ours, text = parts
                return Failure(EngineError(text) if is_ours else RuntimeError(text), step_id)
            case "dict":
                return {self.record(key): self.record(value) for key, value in parts[0]}
            case "tuple":
                return tuple(map(self.record, parts[0]))
            case "list":
                return [self.record(part) for part in parts[0]]
            case "frozenset":
                return frozenset(map(self.record, parts[0]))
        raise ValueError(f"kind {kind!r:.40}")

    def _array(self, name: str, shape: list[int]) -> npt.NDArray[Any]:
        if name not in _DTYPES:
            raise ValueError(f"dtype {name!r:.40}")
        dtype, count = np.dtype(name), int(np.prod(shape, dtype=np.int64))
        found = np.frombuffer(self._body, dtype, count, self._place)
        self._place += count * dtype.itemsize
        return found.reshape(shape).copy()  # aligned, and not read-only: the runner may keep and edit it
