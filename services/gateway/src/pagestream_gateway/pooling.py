"""Vectors, labels and scores: complete what a caller asks of them by the model's card, and read them from a log."""

from collections.abc import Sequence
from struct import unpack

from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import (
    API_FORM_RERANK,
    API_FORM_SCORE,
    LABEL_ACTIVATION_IDENTITY,
    AnswerForm,
    ModelCard,
    Pooling,
)

from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.request import AskedPooling
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
    if asked.classifies or is_cross_encoder(asked, card):
        return _pooling_of_labels(asked, card)
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


def is_cross_encoder(asked: AskedPooling, card: ModelCard) -> bool:
    """Whether a comparison is asked of a model that reads a query and a document together: one with a single label."""
    return asked.num_queries > 0 and len(card.embedding.labels) == 1


def _pooling_of_labels(asked: AskedPooling, card: ModelCard) -> Pooling:
    """Return how probabilities of labels are made, or their scores alone, where `asked` says so.

    Raises UnsupportedField where the model has no labels.
    """
    embedding = card.embedding
    if not embedding.labels:
        raise UnsupportedField("model", f"{card.name} has no labels: it is no model ForSequenceClassification")
    pooling = Pooling(dimensions=len(embedding.labels))
    pooling.MergeFrom(embedding.pooling)
    if asked.activates is False:
        pooling.activation = LABEL_ACTIVATION_IDENTITY
    return pooling


def check_inputs(
    prompts: Sequence[Sequence[int]], field: str, pooling: Pooling, answer: AnswerForm, limits: LimitSettings
) -> None:
    """Check what a request's vectors take before an engine works for them. Raises InvalidRequest."""
    check_num_tokens(sum(map(len, prompts)), field, limits)
    shows_numbers = not answer.vectors.base64 and answer.api not in (API_FORM_SCORE, API_FORM_RERANK)
    num_bytes = len(prompts) * pooling.dimensions * (_JSON_BYTES if shows_numbers else _BASE64_BYTES)
    if num_bytes > limits.max_vector_bytes:
        hint = "; encoding_format base64 takes half" if shows_numbers else ""
        raise InvalidRequest(
            field,
            f"{len(prompts)} vectors of {pooling.dimensions} numbers take about {num_bytes} bytes, at most "
            f"{limits.max_vector_bytes} are given at once{hint}",
        )


def check_num_tokens(num_tokens: int, field: str, limits: LimitSettings) -> None:
    """Check how many tokens the prompts of a request have in all. Raises InvalidRequest."""
    if num_tokens > limits.max_input_tokens:
        raise InvalidRequest(field, f"at most {limits.max_input_tokens} tokens in all, got {num_tokens}")


def numbers_of(vector: bytes) -> tuple[float, ...]:
    """Return the numbers of a vector in a log."""
    return unpack(f"<{len(vector) // 4}f", vector)
