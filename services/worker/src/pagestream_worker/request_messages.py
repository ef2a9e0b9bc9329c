"""A request's wire message as the engine's sampling parameters, and what the engine computes of a prompt as messages.

Of a prompt come log probabilities or a vector, in the parts that a log has.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pagestream.v1.inference_pb2 import (
    EARLY_STOPPING_NEVER,
    EARLY_STOPPING_TRUE,
    EARLY_STOPPING_UNSPECIFIED,
    LogprobEntry,
    StructuredOutputs,
    TokenLogprobs,
)
from pagestream.v1.inference_pb2 import SamplingParams as SamplingMessage
from pagestream.v1.records_pb2 import (
    LABEL_ACTIVATION_IDENTITY,
    LABEL_ACTIVATION_SIGMOID,
    LABEL_ACTIVATION_SOFTMAX,
    POOLING_KIND_CLS,
    POOLING_KIND_LAST,
    POOLING_KIND_MEAN,
    POOLING_KIND_UNSPECIFIED,
    Pooling,
    PromptPart,
    RequestSpec,
)
from pagestream.v1.records_pb2 import (
    ReasoningMarks as ReasoningMessage,
)
from pagestream_engine.errors import InvalidRequest
from pagestream_engine.features.pooling.config import IDENTITY, SIGMOID, SOFTMAX, probabilities_of, vector_of
from pagestream_engine.request import StepOutput, TokenLogprob
from pagestream_engine.sampling_params import (
    STATES_DTYPE,
    ReasoningMarks,
    SamplingParams,
    StructuredOutputsParams,
    child_seed,
)
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


ACTIVATIONS: Mapping[int, str] = {
    LABEL_ACTIVATION_SOFTMAX: SOFTMAX,
    LABEL_ACTIVATION_SIGMOID: SIGMOID,
    LABEL_ACTIVATION_IDENTITY: IDENTITY,
}
"""By what a request says."""
PART_BYTES = 8192
"""Of a part's log probabilities, beyond which it takes no further token."""


def logprobs_message(tokens: Sequence[TokenLogprob]) -> TokenLogprobs:
    """Return the log probabilities at one position."""
    entries = [
        LogprobEntry(token_id=token.token_id, logprob=token.logprob, rank=token.rank, text=token.text)
        for token in tokens
    ]
    return TokenLogprobs(entries=entries)


class PromptParts:
    """How far the parts of a request's prompts go in its log, and what is to be added."""

    def __init__(self, spec: RequestSpec, ends: Mapping[int, int]) -> None:
        self._spec = spec
        self._ends = dict(ends)

    def are_complete(self, first: int) -> bool:
        """Whether the log has all that is wanted of a prompt, whose first choice is given."""
        end = self._ends.get(first, 0)
        if self._spec.HasField("pooling"):
            return end > 0
        return 0 < end >= len(self._spec.prompts[first // max(1, self._spec.sampling.n)].ids) - 1

    def take(self, first: int, output: StepOutput) -> list[tuple[int, bytes]]:
        """Return the parts that the log lacks: of each PromptPart.end, and the part without it."""
        begin = self._ends.get(first, 0)
        if output.pooled is None:
            parts = list(logprob_parts(output.prompt_logprobs or (), begin))
        else:
            parts = [] if begin else [embedding_part(output.pooled, self._spec.pooling)]
        if parts:
            self._ends[first] = parts[-1][0]
        return parts


def logprob_parts(rows: Sequence[Sequence[TokenLogprob]], begin: int) -> Iterator[tuple[int, bytes]]:
    """Yield the log probabilities of a prompt's tokens from the second on, in parts of about PART_BYTES.

    Args:
        rows: of all these tokens.
        begin: how many of them the log has already.

    Yields:
        PromptPart.end, and the part without it. Where parts end is a function of the rows' sizes alone.
    """
    part, num_bytes = PromptPart(), 0
    for end, row in enumerate(rows[begin:], begin + 1):
        message = logprobs_message(row)
        part.logprobs.append(message)
        num_bytes += message.ByteSize()
        if num_bytes >= PART_BYTES or end == len(rows):
            yield end, part.SerializeToString()
            part, num_bytes = PromptPart(), 0


def embedding_part(states: bytes, pooling: Pooling) -> tuple[int, bytes]:
    """Return PromptPart.end and the part of a vector: pooled states, cut and normalised as was asked for; or the
    probabilities of labels.

    Args:
        states: `StepOutput.pooled`.
    """
    if pooling.activation:
        vector = probabilities_of(states, ACTIVATIONS[pooling.activation])
    else:
        vector = vector_of(states, dimensions=pooling.dimensions, normalize=pooling.normalize)
    return len(vector), PromptPart(embedding=vector.astype(STATES_DTYPE).tobytes()).SerializeToString()
