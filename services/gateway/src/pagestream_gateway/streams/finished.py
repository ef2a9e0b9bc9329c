"""The whole answer of a request that has ended, in the form of the API that accepted it."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import NamedTuple

from pagestream.v1.inference_pb2 import Usage
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

from pagestream_gateway.anthropic.answer import MessageWriter, WholeMessage, WholeMessageAnswer
from pagestream_gateway.error_codes import failure, is_failed
from pagestream_gateway.errors import AnswerTooLarge, GenerationFailed, Overloaded
from pagestream_gateway.gateway import Gateway
from pagestream_gateway.openai.chat.completions import ChatWriter
from pagestream_gateway.openai.classification import ClassificationWriter
from pagestream_gateway.openai.completions import CompletionWriter
from pagestream_gateway.openai.embeddings import EmbeddingList, EmbeddingWriter
from pagestream_gateway.openai.responses.answer import ResponseWriter, StoredAnswer, WholeResponse
from pagestream_gateway.openai.scoring import RerankWriter, ScoreList, ScoreWriter
from pagestream_gateway.openai.writer import AnswerBody, LogWriter, WholeBody
from pagestream_gateway.streams.events import learn_tokens
from pagestream_gateway.streams.whole_answer import WholeAnswer


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


_RETRY_AFTER_S = 5.0


async def collect(gateway: Gateway, spec: RequestSpec, *, max_bytes: int) -> tuple[bytes, Usage]:
    """Return a request's answer as its API would have given it, and its usage. It follows a log that has not ended.

    The bytes are part of what whole answers may take in this process; they are waited for.

    Raises:
        GenerationFailed: the log ended with an error.
        AnswerTooLarge: the answer has more than `max_bytes` bytes, about.
        Overloaded: other answers take the memory.
        RequestNotFound, Unavailable: as the log's reader.
    """
    budget = gateway.answer_budget
    num_bytes = min(max_bytes, budget.limit_bytes)
    kind = kind_of(spec)
    writer = kind.writer(spec)
    await learn_tokens(gateway, writer)
    limit_s = gateway.settings.stream.whole_answer_wait_s
    try:
        async with asyncio.timeout(limit_s):
            await budget.take(num_bytes)
    except TimeoutError as error:
        raise Overloaded(f"other answers have used this gateway's memory for {limit_s:g} s", _RETRY_AFTER_S) from error
    try:
        return await _collect(gateway, spec, writer, kind.body, num_bytes)
    finally:
        budget.give(num_bytes)


async def _collect(
    gateway: Gateway, spec: RequestSpec, writer: LogWriter, kind: type[AnswerBody], max_bytes: int
) -> tuple[bytes, Usage]:
    body, next_index = kind(writer), 0
    async with aclosing(gateway.requests.follow(spec)) as batches:
        async for batch in batches:
            for run in writer.split(next_index, batch):
                next_index = run.next_index
                if run.end is None:
                    body.add(run)
                    continue
                if is_failed(spec, run.end):
                    raise failure(spec, run.end)
                fingerprint = await gateway.requests.fingerprint(spec)
                writer.set_fingerprint(fingerprint)
                body.set_fingerprint(fingerprint)
                return b"".join(body.parts(run.end)), run.end.usage
            if body.num_bytes > max_bytes:
                raise AnswerTooLarge(spec.request_id, max_bytes)
    raise GenerationFailed("log_without_end", "the log ended without its finish record")
