"""POST /v1/classify, /v1/score and /v1/rerank, and their other paths, as vLLM's: their bodies, routes and answers.

An engine computes the probabilities of labels. Scores are cosines of vectors, or what a model says that reads a query
and a document together.
"""

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from operator import mul
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pagestream.v1.inference_pb2 import Usage
from pagestream.v1.records_pb2 import (
    API_FORM_CLASSIFY,
    API_FORM_RERANK,
    API_FORM_SCORE,
    LogEnd,
    RequestSpec,
    VectorForm,
)
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from pagestream_gateway.calls import EMBEDDINGS
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.http.body import Body, Items, expects, parse_body
from pagestream_gateway.http.documents import AnswersByPath, at, body_of
from pagestream_gateway.openai import generation
from pagestream_gateway.openai.embeddings import (
    UNSUPPORTED,
    VECTORS,
    EmbeddingList,
    EmbeddingWriter,
    VectorBody,
    VectorUsage,
    usage_of,
    vector_request,
)
from pagestream_gateway.openai.generation import Prompts, prompts_of, without_unsupported
from pagestream_gateway.pooling import numbers_of
from pagestream_gateway.request import AskedPooling, Draft, TextPrompt
from pagestream_gateway.streams.events import LogWriter, Position, Run

_RESULT_BYTES = 128  # of a result's object, without a document's text


class TextObject(Body):
    """A text as Cohere's and Jina's clients may send it."""

    text: str


Text = Annotated[str | TextObject, expects("must be a string, or an object with its text")]
Texts = Annotated[str | TextObject | Items[str | TextObject], expects("must be a string or a list of strings")]


class ClassificationBody(VectorBody):
    """POST /classify."""

    input: Prompts = Field(description="Text, token ids, or a list of either; each gets a label.")


class ScoringBody(VectorBody):
    """The fields of both bodies."""

    max_tokens_per_query: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="To which each query is cut before it is put into a prompt; 0 (default): it is not."
    )
    max_tokens_per_doc: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="To which each document is cut, likewise."
    )


class ScoreBody(ScoringBody):
    """POST /v1/score: one text or several on the left, as many or more on the right; in vLLM's spellings."""

    text_1: Texts | None = Field(None, description="The queries: one, or as many as text_2.")
    text_2: Texts | None = Field(None, description="The texts that are compared with them.")
    data_1: Texts | None = Field(None, description="Another name of text_1.")
    data_2: Texts | None = Field(None, description="Another name of text_2.")
    queries: Texts | None = Field(None, description="Another name of text_1.")
    documents: Texts | None = Field(None, description="Another name of text_2.")
    items: Texts | None = Field(None, description="Another name of text_2.")


class RerankBody(ScoringBody):
    """POST /v1/rerank."""

    query: Text
    documents: Texts = Field(description="The texts that are ordered by their scores: strings, or objects with `text`.")
    top_n: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(None, description="Most results; 0 (default): all.")
    return_documents: bool | None = Field(None, description="Whether results hold the documents' texts. Default true.")


class ClassificationWriter(EmbeddingWriter):
    """Writes probabilities of labels; those of an input are an event of a stream."""

    def item(self, run: Run) -> str:
        """Return an input's classification, without its last brace: the likeliest label, and all probabilities."""
        probabilities = numbers_of(run.embedding)
        labels = self.spec.answer.vectors.labels
        best = max(range(len(labels)), key=lambda number: (probabilities[number], -number))
        shown = ",".join(f"{number:.9g}" for number in probabilities)
        label = json.dumps(labels[best])
        return f'{{"index":{run.choice},"label":{label},"probs":[{shown}],"num_classes":{len(labels)}'


class ScoringWriter(LogWriter):
    """Writes scores, which are known when the log has ended: a stream has one event."""

    needs_history = True

    def __init__(self, spec: RequestSpec) -> None:
        super().__init__(spec)
        self.similarities = Similarities(spec)

    @abstractmethod
    def whole(self, usage: Usage) -> dict[str, Any]:
        """Return the whole answer."""

    def skip(self, run: Run) -> None:
        self.similarities.add(run)

    def chunk(self, run: Run) -> str | None:
        self.similarities.add(run)
        return None

    def usage(self, end: LogEnd, position: Position) -> str | None:
        return json.dumps({**self.whole(end.usage), "stream_position": position.event_id(self.spec.request_id)})


class ScoreWriter(ScoringWriter):
    """Writes scores by the documents' numbers."""

    def whole(self, usage: Usage) -> dict[str, Any]:
        scores = self.similarities.scores
        return {
            "id": self.spec.request_id,
            "object": "list",
            "created": self.spec.answer.created,
            "model": self.spec.model,
            "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
            "usage": usage_of(usage),
        }


class RerankWriter(ScoringWriter):
    """Writes documents by their scores, best first."""

    def whole(self, usage: Usage) -> dict[str, Any]:
        scores, form = self.similarities.scores, self.spec.answer.vectors
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: form.top_n or None]
        return {
            "id": self.spec.request_id,
            "model": self.spec.model,
            "usage": usage_of(usage),
            "results": [
                {
                    "index": index,
                    **({"document": {"text": form.documents[index]}} if form.documents else {}),
                    "relevance_score": scores[index],
                }
                for index in order
            ],
        }


class ScoreList:
    """The body of a whole answer."""

    def __init__(self, writer: ScoringWriter) -> None:
        self._writer = writer
        self.num_bytes = self.empty_bytes(writer)
        """See AnswerBody."""

    @staticmethod
    def empty_bytes(writer: ScoringWriter) -> int:
        """See AnswerBody."""
        texts = sum(len(text.encode()) for text in writer.spec.answer.vectors.documents)
        return _RESULT_BYTES * writer.num_choices + texts

    @staticmethod
    def size_of(writer: ScoringWriter, run: Run) -> int:
        """See AnswerBody."""
        return len(run.embedding)

    def set_fingerprint(self, fingerprint: str) -> None:
        """See AnswerBody. Scores don't show it, as vLLM's don't."""

    def add(self, run: Run) -> None:
        """See AnswerBody."""
        self.num_bytes += self._writer.similarities.add(run)

    def serialize(self, end: LogEnd) -> Iterator[bytes]:
        """See AnswerBody."""
        yield json.dumps(self._writer.whole(end.usage), ensure_ascii=False, separators=(",", ":")).encode()


def parse_classification(document: dict[str, Any], headers: Mapping[str, str]) -> Draft:
    """Read the body of a classification and its headers. Raises InvalidRequest."""
    body = parse_body(ClassificationBody, without_unsupported(document, UNSUPPORTED))
    return vector_request(
        body,
        headers,
        document,
        API_FORM_CLASSIFY,
        prompts=prompts_of(body.input, body.add_special_tokens is not False),
        prompt_field="input",
        form=VectorForm(),
        pooling=AskedPooling(classifies=True, activates=body.use_activation),
    )


def parse_score(document: dict[str, Any], headers: Mapping[str, str]) -> Draft:
    """Read the body of a score and its headers. Raises InvalidRequest."""
    body = parse_body(ScoreBody, without_unsupported(document, UNSUPPORTED))
    query_field, queries = _one_of(body, "text_1", "data_1", "queries")
    field, documents = _one_of(body, "text_2", "data_2", "documents", "items")
    if len(queries) not in (1, len(documents)):
        expected = f"must be one text or as many as {field}, {len(documents)}"
        raise InvalidRequest(query_field, f"{expected}, got {len(queries)}")
    texts = _texts(body, queries, documents, (query_field, field))
    return vector_request(body, headers, document, API_FORM_SCORE, form=VectorForm(), **texts)


def parse_rerank(document: dict[str, Any], headers: Mapping[str, str]) -> Draft:
    """Read the body of a rerank and its headers. Raises InvalidRequest."""
    body = parse_body(RerankBody, without_unsupported(document, UNSUPPORTED))
    query = _text(body.query)
    if not query:
        raise InvalidRequest("query", "must not be empty")
    documents = _listed(body.documents)
    shown = [] if body.return_documents is False else documents
    form = VectorForm(top_n=body.top_n or 0, documents=shown)
    texts = _texts(body, [query], documents, ("query", "documents"))
    return vector_request(body, headers, document, API_FORM_RERANK, form=form, **texts)


def _texts(body: ScoringBody, queries: list[str], documents: list[str], names: tuple[str, str]) -> dict[str, Any]:
    """Return the arguments of `vector_request` that scores and reranks fill alike; `names`: of both fields."""
    if not documents:
        raise InvalidRequest(names[1], "must not be empty")
    adds = body.add_special_tokens is not False
    return {
        "prompts": [TextPrompt(text, adds) for text in (*queries, *documents)],
        "prompt_field": names[1],
        "pooling": AskedPooling(
            normalize=True,
            activates=body.use_activation,
            num_query_tokens=body.max_tokens_per_query or 0,
            num_doc_tokens=body.max_tokens_per_doc or 0,
            num_queries=len(queries),
            query_field=names[0],
        ),
    }


def _one_of(body: ScoreBody, *names: str) -> tuple[str, list[str]]:
    """Return the name and the texts of a field that has several. Raises InvalidRequest unless exactly one is given."""
    given = {name: texts for name in names if (texts := getattr(body, name)) is not None}
    if len(given) != 1:
        raise InvalidRequest(names[0], f"exactly one of {', '.join(names)} must be given")
    ((name, texts),) = given.items()
    return name, _listed(texts)


def _text(given: str | TextObject) -> str:
    return given if isinstance(given, str) else given.text


def _listed(given: str | TextObject | list[str | TextObject]) -> list[str]:
    return [_text(each) for each in given] if isinstance(given, list) else [_text(given)]


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


ANSWERS: AnswersByPath = {
    **at(
        ("/v1/classify", "/classify"),
        VECTORS._replace(whole=ClassificationAnswer, examples={"A text": {"input": ["The harbour is lovely."]}}),
    ),
    **at(
        ("/v1/score", "/score"),
        VECTORS._replace(
            whole=ScoreAnswer,
            examples={
                "A text and two others": {
                    "text_1": "Where does the baker work?",
                    "text_2": ["In the bakery.", "At sea."],
                }
            },
        ),
    ),
    **at(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        VECTORS._replace(
            whole=RerankAnswer,
            examples={
                "The best of two": {
                    "query": "Where does the baker work?",
                    "documents": ["In the bakery.", "At sea."],
                    "top_n": 1,
                }
            },
        ),
    ),
}
"""By method and path."""


def router(gateway: Gateway) -> APIRouter:
    """Return the routes of the three resources."""
    routes = APIRouter(tags=["vectors"])

    @routes.post("/score", openapi_extra=body_of(ScoreBody), summary="Compare texts")
    @routes.post("/v1/score", openapi_extra=body_of(ScoreBody), summary="Compare texts")
    async def score(request: Request) -> Response:
        call = gateway.calls.begin("score", EMBEDDINGS, request.headers)
        return await generation.generate(gateway, request, call, parse_score, writer=ScoreWriter, body=ScoreList)

    @routes.post("/rerank", openapi_extra=body_of(RerankBody), summary="Order documents by a query")
    @routes.post("/v2/rerank", openapi_extra=body_of(RerankBody), summary="Order documents by a query")
    @routes.post("/v1/rerank", openapi_extra=body_of(RerankBody), summary="Order documents by a query")
    async def rerank(request: Request) -> Response:
        call = gateway.calls.begin("rerank", EMBEDDINGS, request.headers)
        return await generation.generate(gateway, request, call, parse_rerank, writer=RerankWriter, body=ScoreList)

    @routes.post("/classify", openapi_extra=body_of(ClassificationBody), summary="Give texts labels")
    @routes.post("/v1/classify", openapi_extra=body_of(ClassificationBody), summary="Give texts labels")
    async def classify(request: Request) -> Response:
        call = gateway.calls.begin("classify", EMBEDDINGS, request.headers)
        return await generation.generate(
            gateway, request, call, parse_classification, writer=ClassificationWriter, body=EmbeddingList
        )

    return routes


class Similarities:
    """The cosine of each document and its query: the only one, or the one of the document's number.

    The first prompts of the request are the queries, the others the documents. Vectors have length 1, so that their
    product is the cosine. A request without queries has pairs for prompts, whose vectors are their scores.
    """

    def __init__(self, spec: RequestSpec) -> None:
        self._num_queries = spec.answer.vectors.num_queries
        self.scores = [0.0] * (len(spec.prompts) - self._num_queries)
        """By document; complete at the log's end."""
        self._queries: dict[int, tuple[float, ...]] = {}
        self._documents: dict[int, bytes] = {}
        """Documents that wait for their query, by number."""

    def add(self, run: Run) -> int:
        """Take a vector, and return the bytes that are held more, or less, than before."""
        if not run.embedding:
            return 0
        if not self._num_queries:
            (self.scores[run.choice],) = numbers_of(run.embedding)
            return 0
        if run.choice >= self._num_queries:
            number = run.choice - self._num_queries
            if self._score(number, run.embedding):
                return 0
            self._documents[number] = run.embedding
            return len(run.embedding)
        self._queries[run.choice] = numbers_of(run.embedding)
        scored = [number for number, vector in self._documents.items() if self._score(number, vector)]
        freed = sum(len(self._documents.pop(number)) for number in scored)
        return 8 * len(run.embedding) - freed

    def _score(self, number: int, vector: bytes) -> bool:
        query = self._queries.get(0 if self._num_queries == 1 else number)
        if query is not None:
            self.scores[number] = max(-1.0, min(1.0, sum(map(mul, query, numbers_of(vector)))))
        return query is not None
