"""The engine's sampling parameters of a request from its wire message."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from pagestream.v1.inference_pb2 import (
    EARLY_STOPPING_NEVER,
    EARLY_STOPPING_TRUE,
    EARLY_STOPPING_UNSPECIFIED,
    StructuredOutputs,
)
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.records_pb2 import (
    POOLING_KIND_CLS,
    POOLING_KIND_LAST,
    POOLING_KIND_MEAN,
    POOLING_KIND_UNSPECIFIED,
    RequestSpec,
)
from pagestream.v1.records_pb2 import (
    ReasoningMarks as ReasoningMessage,
)
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.sampling_params import ReasoningMarks, SamplingParams, StructuredOutputsParams, child_seed
from pagestream_options.sampling import SAMPLING_PARAMETERS

_FIELDS = SamplingMessage.DESCRIPTOR.fields_by_name
_EARLY_STOPPING: dict[int, bool | str] = {
    EARLY_STOPPING_UNSPECIFIED: False,
    EARLY_STOPPING_TRUE: True,
    EARLY_STOPPING_NEVER: "never",
}
_POOLINGS: dict[int, str] = {
    POOLING_KIND_UNSPECIFIED: "last",
    POOLING_KIND_LAST: "last",
    POOLING_KIND_MEAN: "mean",
    POOLING_KIND_CLS: "cls",
}


def child_of(spec: RequestSpec, choice: int) -> int:
    """Return which child of the request's seed a choice gets.

    Siblings of a prompt always differ. Prompts differ where the gateway chose the seed; with a client's own seed each
    prompt gets what it would get alone.
    """
    return choice if spec.seed_for_each_prompt else choice % max(1, spec.sampling.n)


def sampling_of(spec: RequestSpec) -> SamplingParams:
    """Return the parameters that all choices of a request come from, see `sampling_of_child`.

    Raises:
        InvalidRequest: the request asks for what this engine doesn't support.
    """
    if not spec.HasField("pooling"):
        return _from_message(spec.sampling, _marks(spec.reasoning) if spec.HasField("reasoning") else None)
    kind = _POOLINGS.get(spec.pooling.kind)
    if kind is None:
        raise InvalidRequest(f"pooling: given kind {spec.pooling.kind}, which this engine does not know")
    return SamplingParams(max_tokens=0, temperature=0.0, seed=spec.sampling.seed, pooling=kind)


def sampling_of_child(params: SamplingParams, child: int) -> SamplingParams:
    """Return the parameters of one choice of a request: `n` is 1, the seed is that choice's own, or with `best_of` its
    prompt's. They are not checked again.

    Args:
        params: of the request, from `sampling_of`.
        child: see `child_of`.
    """
    if params.pooling is not None:
        return params
    if params.has_best_of:  # All choices of a prompt have its seed, from which those that take part get theirs.
        child -= child % params.n
    return params.for_child(child_seed(params.seed or 0, child), 0)


def _from_message(message: SamplingMessage, reasoning: ReasoningMarks | None) -> SamplingParams:
    given = {
        name: _value(message, name)
        for name, each in SAMPLING_PARAMETERS.items()
        if each.body is not None and (not _FIELDS[name].has_presence or message.HasField(cast(Any, name)))
    }
    if message.early_stopping not in _EARLY_STOPPING:
        raise InvalidRequest(f"early_stopping: given {message.early_stopping}, which this engine does not know")
    given |= {"n": max(1, message.n), "seed": message.seed, "early_stopping": _EARLY_STOPPING[message.early_stopping]}
    if message.HasField("structured_outputs"):
        given["structured_outputs"] = _constraint(message.structured_outputs, reasoning)
    return SamplingParams(**given)


def _value(message: SamplingMessage, name: str) -> Any:
    """Return a field's value; None where a list or mapping is empty."""
    value = getattr(message, name)
    if isinstance(value, Mapping):
        return dict(value) or None
    return (tuple(value) or None) if isinstance(value, Sequence) else value


def _constraint(message: StructuredOutputs, reasoning: ReasoningMarks | None) -> StructuredOutputsParams:
    given = message.WhichOneof("constraint")
    return StructuredOutputsParams(
        json=message.json if given == "json" else None,
        regex=message.regex if given == "regex" else None,
        choice=tuple(message.choice.texts) if given == "choice" else None,
        grammar=message.grammar if given == "grammar" else None,
        json_object=message.json_object if given == "json_object" else None,
        disable_any_whitespace=message.disable_any_whitespace,
        reasoning=reasoning,
    )


def _marks(message: ReasoningMessage) -> ReasoningMarks:
    return ReasoningMarks(tuple(message.end.ids), tuple(tuple(opening.ids) for opening in message.openings))
