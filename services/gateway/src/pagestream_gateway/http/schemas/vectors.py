"""Embeddings, labels, scores and ranks."""

from typing import Literal

from pydantic import BaseModel, Field


class VectorUsage(BaseModel):
    """Tokens of a request for vectors."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class Embedding(BaseModel):
    """The vector of an input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers, or in base64 float32 in little-endian order.")


class EmbeddingEvent(Embedding):
    """The data of an event of an embedding request that is read on: one vector."""

    stream_position: str


class EmbeddingAnswer(BaseModel):
    """The vectors of a request; as the last event of a stream without them."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: VectorUsage


class Classification(BaseModel):
    """The labels of a text."""

    index: int
    label: str
    """The likeliest."""
    probs: list[float]
    """Of each label, in the order of the model's files."""
    num_classes: int


class ClassificationAnswer(BaseModel):
    """The labels of a request's texts; as the last event of a stream without them."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: VectorUsage


class Score(BaseModel):
    """How alike a text is to its query: a cosine."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(BaseModel):
    """The scores of a request."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage


class RerankResult(BaseModel):
    """A document with its score."""

    index: int
    document: dict[str, str] | None = None
    relevance_score: float


class RerankAnswer(BaseModel):
    """The documents of a request, best first."""

    id: str
    model: str
    usage: VectorUsage
    results: list[RerankResult]
