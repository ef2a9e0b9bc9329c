"""Scores of queries and documents, as vectors come out of a log: their cosines, or the numbers of a model itself."""

from operator import mul
from struct import unpack

from pagestream.v1.records_pb2 import RequestSpec

from pagestream_gateway.streams.runs import Run


def numbers_of(vector: bytes) -> tuple[float, ...]:
    """Return the numbers of a vector in a log."""
    return unpack(f"<{len(vector) // 4}f", vector)


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
        """That wait for their query, by number."""

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
