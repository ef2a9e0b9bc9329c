"""Vectors, labels and scores of prompts, of what an engine has pooled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pagestream_engine.errors import InvalidRequest
from pagestream_engine.models.pooling import IDENTITY, PoolingConfig, probabilities_of, vector_of
from pagestream_engine.offline.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pagestream_engine.offline.prompts import ChatTemplate, EncodedPrompt
from pagestream_engine.sampling_params import PoolingParams

Pooled = Sequence[tuple[RequestOutput, bytes]]


def check_vectors(pooling: PoolingConfig, params: PoolingParams, size: int) -> None:
    """Raise InvalidRequest where a model gives no vectors, or none of so many numbers."""
    if pooling.unsupported:
        raise InvalidRequest(f"pooling: {pooling.unsupported}, which is not supported")
    if params.dimensions and not pooling.allows(params.dimensions, size):
        raise InvalidRequest(
            f"dimensions: given {params.dimensions}, expected 0 or a number that the model's files allow"
        )


def check_labels(pooling: PoolingConfig) -> None:
    """Raise InvalidRequest where a model has no labels."""
    if not pooling.labels:
        raise InvalidRequest("classify: given a model without labels, expected one ForSequenceClassification")


def embeddings_of(pooled: Pooled, pooling: PoolingConfig, params: PoolingParams) -> list[EmbeddingRequestOutput]:
    """Return vectors."""
    normalize = pooling.normalize if params.normalize is None else params.normalize
    found = []
    for output, states in pooled:
        vector = vector_of(states, dimensions=params.dimensions or 0, normalize=normalize).tolist()
        found.append(
            EmbeddingRequestOutput(
                output.request_id, EmbeddingOutput(vector), output.prompt_token_ids, output.num_cached_tokens
            )
        )
    return found


def labels_of(pooled: Pooled, pooling: PoolingConfig, params: PoolingParams) -> list[ClassificationRequestOutput]:
    """Return probabilities of labels, or their scores."""
    activation = IDENTITY if params.use_activation is False else pooling.activation
    return [
        ClassificationRequestOutput(
            output.request_id,
            ClassificationOutput(probabilities_of(states, activation).tolist()),
            output.prompt_token_ids,
            output.num_cached_tokens,
        )
        for output, states in pooled
    ]


def scores_of_pairs(labelled: Sequence[ClassificationRequestOutput]) -> list[ScoringRequestOutput]:
    """Return the one probability of each pair."""
    return [
        ScoringRequestOutput(
            each.request_id, ScoringOutput(each.outputs.probs[0]), each.prompt_token_ids, each.num_cached_tokens
        )
        for each in labelled
    ]


def similarities(
    pairs: Sequence[tuple[EmbeddingRequestOutput, EmbeddingRequestOutput]],
) -> list[ScoringRequestOutput]:
    """Return the cosine of the angle between the vectors of each pair."""
    found = []
    for one, other in pairs:
        left, right = (np.asarray(each.outputs.embedding, np.float64) for each in (one, other))
        length = float(np.linalg.norm(left) * np.linalg.norm(right))
        found.append(
            ScoringRequestOutput(
                f"{one.request_id}_{other.request_id}",
                ScoringOutput(float(left @ right) / length if length else 0.0),
                one.prompt_token_ids + other.prompt_token_ids,
                one.num_cached_tokens + other.num_cached_tokens,
            )
        )
    return found


def pair_prompts(
    pairs: Sequence[tuple[str, str]],
    tokenizer: Tokenizer | None,
    pooling: PoolingConfig,
    template: ChatTemplate,
) -> list[EncodedPrompt]:
    """Return prompts that a model reads two texts in: by a chat template that has roles for query and document, else
    one after the other where the model's files say so, else as the tokenizer makes one prompt of two texts.
    """
    if tokenizer is None:
        raise InvalidRequest("score: given texts for a model without a tokenizer.json, expected a model with one")
    if template.has_pair_roles:
        encoded = tokenizer.encode_batch([_rendered(pair, template) for pair in pairs])
    elif pooling.joins_pairs:
        encoded = tokenizer.encode_batch([query + document for query, document in pairs])
    else:
        encoded = tokenizer.encode_batch(list(pairs))
    return [EncodedPrompt(None, each.ids) for each in encoded]


def _rendered(pair: tuple[str, str], template: ChatTemplate) -> str:
    query, document = pair
    messages: list[dict[str, Any]] = [
        {"role": "query", "content": query},
        {"role": "document", "content": document},
    ]
    return template.render(messages, add_generation_prompt=False)
