"""The whole answer of a request that has ended, as bytes, for a reader that is no client."""

import asyncio
from contextlib import aclosing

from pagestream.v1.inference_pb2 import Usage
from pagestream.v1.records_pb2 import RequestSpec

from pagestream_gateway.api.failures import failure, is_failed
from pagestream_gateway.api.finished.kinds import kind_of
from pagestream_gateway.api.openai.answers import learn_tokens
from pagestream_gateway.api.openai.writer import AnswerBody, LogWriter
from pagestream_gateway.core.gateway import Gateway
from pagestream_gateway.errors import AnswerTooLarge, GenerationFailed, Overloaded

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
