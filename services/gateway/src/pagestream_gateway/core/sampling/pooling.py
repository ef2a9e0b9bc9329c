"""Complete what a caller asks of vectors by the model's card, and check it."""

from collections.abc import Sequence

from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import AnswerForm, ModelCard, Pooling

from pagestream_gateway.core.drafts import AskedPooling
from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.settings import LimitSettings

_JSON_BYTES, _BASE64_BYTES = 12, 6  # of a number


def sampling_of_vectors() -> SamplingParams:
    """Return the parameters of a request for vectors: nothing is drawn, so that its seed says nothing."""
    return SamplingParams(n=1, max_tokens=0, seed=0)


def resolve_pooling(asked: AskedPooling, card: ModelCard) -> Pooling:
    """Return how a request's vectors are made: as asked for, else as the model's files say.

    Raises UnsupportedField where the model gives no vectors, InvalidRequest where it gives none of that size.
    """
    embedding = card.embedding
    if asked.classifies:
        return _pooling_of_labels(card)
    if not card.HasField("embedding") or embedding.unsupported:
        raise UnsupportedField(
            "model", f"{card.name} gives no vectors: {embedding.unsupported or 'no engine makes any'}"
        )
    pooling = Pooling()
    pooling.CopyFrom(embedding.pooling)
    pooling.dimensions = embedding.size if asked.dimensions is None else asked.dimensions
    if asked.normalize is not None:
        pooling.normalize = asked.normalize
    allowed = list(embedding.dimensions)
    if pooling.dimensions == embedding.size:
        return pooling
    if not embedding.is_matryoshka:
        raise InvalidRequest(
            "dimensions",
            f"vectors of {card.name} have {embedding.size} numbers, and its files don't say that they may be cut",
        )
    if pooling.dimensions not in (allowed or range(1, embedding.size)):
        expected = f"one of {', '.join(map(str, allowed))}" if allowed else f"from 1 to {embedding.size}"
        raise InvalidRequest("dimensions", f"must be {expected}, got {pooling.dimensions}")
    return pooling


def _pooling_of_labels(card: ModelCard) -> Pooling:
    """Return how probabilities of labels are made. Raises UnsupportedField where the model has no labels."""
    embedding = card.embedding
    if not embedding.labels:
        raise UnsupportedField("model", f"{card.name} has no labels: it is no model ForSequenceClassification")
    pooling = Pooling(dimensions=len(embedding.labels))
    pooling.MergeFrom(embedding.pooling)
    return pooling


def check_inputs(
    prompts: Sequence[Sequence[int]], field: str, pooling: Pooling, answer: AnswerForm, limits: LimitSettings
) -> None:
    """Check what a request's vectors take before an engine works for them. Raises InvalidRequest."""
    num_tokens = sum(map(len, prompts))
    if num_tokens > limits.max_input_tokens:
        raise InvalidRequest(field, f"at most {limits.max_input_tokens} tokens in all, got {num_tokens}")
    shows_numbers = not answer.vectors.base64 and not answer.vectors.num_queries
    num_bytes = len(prompts) * pooling.dimensions * (_JSON_BYTES if shows_numbers else _BASE64_BYTES)
    if num_bytes > limits.max_vector_bytes:
        hint = "; encoding_format base64 takes half" if shows_numbers else ""
        raise InvalidRequest(
            field,
            f"{len(prompts)} vectors of {pooling.dimensions} numbers take about {num_bytes} bytes, at most "
            f"{limits.max_vector_bytes} are given at once{hint}",
        )
