"""What the engine computes of a prompt, as the parts that a log has: log probabilities, or a vector."""

from collections.abc import Iterator, Mapping, Sequence

from pagestream.v1.inference_pb2 import LogprobEntry, TokenLogprobs
from pagestream.v1.records_pb2 import (
    LABEL_ACTIVATION_IDENTITY,
    LABEL_ACTIVATION_SIGMOID,
    LABEL_ACTIVATION_SOFTMAX,
    Pooling,
    PromptPart,
    RequestSpec,
)
from pagestream_engine.features.pooling import IDENTITY, SIGMOID, SOFTMAX, probabilities_of, vector_of
from pagestream_engine.request import StepOutput, TokenLogprob
from pagestream_engine.sampling_params import STATES_DTYPE

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
