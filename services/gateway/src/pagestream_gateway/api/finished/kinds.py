"""What writes the whole answer of a request, by the API that accepted it."""

from collections.abc import Mapping
from typing import NamedTuple

from pagestream.v1.records_pb2 import (
    API_FORM_CHAT_COMPLETIONS,
    API_FORM_CLASSIFY,
    API_FORM_EMBEDDINGS,
    API_FORM_MESSAGES,
    API_FORM_RERANK,
    API_FORM_RESPONSES,
    API_FORM_SCORE,
    RequestSpec,
)

from pagestream_gateway.api.anthropic.answers import WholeMessageAnswer
from pagestream_gateway.api.anthropic.writer import MessageWriter, WholeMessage
from pagestream_gateway.api.openai.chat_completions import ChatWriter
from pagestream_gateway.api.openai.completions import CompletionWriter
from pagestream_gateway.api.openai.responses.answers import StoredAnswer
from pagestream_gateway.api.openai.responses.writer import ResponseWriter, WholeResponse
from pagestream_gateway.api.openai.vectors.classification import ClassificationWriter
from pagestream_gateway.api.openai.vectors.embeddings import EmbeddingList, EmbeddingWriter
from pagestream_gateway.api.openai.vectors.scoring import RerankWriter, ScoreList, ScoreWriter
from pagestream_gateway.api.openai.whole_answer import WholeAnswer
from pagestream_gateway.api.openai.whole_body import WholeBody
from pagestream_gateway.api.openai.writer import AnswerBody, LogWriter


class AnswerKind(NamedTuple):
    """The classes that make a whole answer."""

    writer: type[LogWriter]
    body: type[AnswerBody]
    whole: type[WholeAnswer] = WholeAnswer


_KINDS: Mapping[int, AnswerKind] = {
    API_FORM_CHAT_COMPLETIONS: AnswerKind(ChatWriter, WholeBody),
    API_FORM_RESPONSES: AnswerKind(ResponseWriter, WholeResponse, StoredAnswer),
    API_FORM_MESSAGES: AnswerKind(MessageWriter, WholeMessage, WholeMessageAnswer),
    API_FORM_EMBEDDINGS: AnswerKind(EmbeddingWriter, EmbeddingList),
    API_FORM_CLASSIFY: AnswerKind(ClassificationWriter, EmbeddingList),
    API_FORM_SCORE: AnswerKind(ScoreWriter, ScoreList),
    API_FORM_RERANK: AnswerKind(RerankWriter, ScoreList),
}


def kind_of(spec: RequestSpec) -> AnswerKind:
    """Return what makes a request's whole answer; that of gRPC is read as a completion."""
    return _KINDS.get(spec.answer.api, AnswerKind(CompletionWriter, WholeBody))
