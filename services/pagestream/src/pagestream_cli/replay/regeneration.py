"""Generation of a recorded request again: by the running deployment, or in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from pagestream_cli.errors import CliError, ReplayFailedError
from pagestream_cli.replay.answers import Answer, read_log

if TYPE_CHECKING:
    from pagestream.v1.records_pb2 import LogEntry, RequestSpec
    from pagestream_engine import SamplingParams
    from pagestream_streams import Broker, GatewaySession

OVERTIME_S = 10.0
"""Seconds from the limit to the deadline of a copy, which ends it where this process is killed before it cancels."""


def bounded(spec: RequestSpec, recorded: Sequence[Answer]) -> RequestSpec:
    """Copy a request; where its recorded answer was cut short, the copy ends no later."""
    from pagestream.v1.records_pb2 import RequestSpec

    copy = RequestSpec()
    copy.CopyFrom(spec)
    if any(answer.is_cut_short for answer in recorded):
        copy.sampling.max_tokens = max(1, *(len(answer.token_ids) for answer in recorded), copy.sampling.min_tokens)
    return copy


async def by_deployment(broker: Broker, spec: RequestSpec, limit_s: float) -> list[Answer]:
    """Let the deployment generate a copy with the same seed, under its own id, and return the answers.

    Raises:
        ReplayFailedError: no engine ended it within the limit.
        StreamsError: Redis does not answer, or the queue is full.
    """
    from pagestream.v1.inference_pb2 import ON_DISCONNECT_CONTINUE
    from pagestream.v1.records_pb2 import RequestSpec
    from pagestream_streams import GatewaySession, RequestNotFound

    copy = RequestSpec()
    copy.CopyFrom(spec)
    copy.client_request_id = f"replay of {spec.request_id}"
    # The session below does not serve, so that the grace period of requests whose gateways are away does not run:
    # its reader does not count, and the copy has to continue without one.
    copy.on_disconnect, copy.deadline_ms = ON_DISCONNECT_CONTINUE, round((max(limit_s, 0) + OVERTIME_S) * 1000)
    copy.traceparent = copy.tracestate = copy.idempotency_key = ""
    async with GatewaySession(broker, "replay", serves=False) as session:
        copy.request_id = await session.place(spec.model, spec.prompts[0].ids, copy.tenant, cache_salt=spec.cache_salt)
        try:
            await session.accept(copy)
            async with asyncio.timeout(limit_s):
                entries = await whole_log(session, copy.request_id, copy.tenant)
        except TimeoutError as error:
            raise ReplayFailedError(
                f"the copy {copy.request_id} has not ended within {limit_s:g} s",
                hint="does an engine run? give it more time with --limit, or generate here with --model FOLDER",
            ) from error
        finally:
            with suppress(RequestNotFound):  # it was refused
                await broker.cancel(copy.request_id, copy.tenant)  # changes nothing where it has ended
    if entries[-1].end.HasField("error"):
        error_of = entries[-1].end.error
        raise ReplayFailedError(f"the copy {copy.request_id} failed: {error_of.code}: {error_of.message}")
    return read_log(copy, entries)


async def whole_log(session: GatewaySession, request_id: str, tenant: str) -> list[LogEntry]:
    """Read all entries, up to the end."""
    entries: list[LogEntry] = []
    async with aclosing(session.read(request_id, tenant=tenant)) as batches:
        async for batch in batches:
            entries += batch
    return entries


def offline(spec: RequestSpec, folder: str, *, dtype: str, deterministic: bool) -> list[Answer]:
    """Generate with a model folder in this process and return the answers.

    Raises:
        UsageError: `folder` is no model folder.
        CliError: the engine refuses the request or an option.
        ReplayFailedError: a choice failed.
    """
    from pagestream_cli.serve.model import choose_model

    source = choose_model(folder, None).source
    from pagestream_engine import LLM

    siblings = max(1, spec.sampling.n)
    prompts = [list(prompt.ids) for prompt in spec.prompts for _ in range(siblings)]
    try:
        llm = LLM(source, dtype=dtype, deterministic=deterministic or None)
        outputs = llm.generate(prompts, _params(spec, len(prompts)))
    except ValueError as error:
        raise CliError(str(error)) from error
    answers = []
    for output in outputs:
        [choice] = output.outputs
        if choice.error is not None:
            raise ReplayFailedError(f"the engine failed: {choice.error}")
        stop = "" if choice.stop_reason is None else str(choice.stop_reason)
        chosen = zip(choice.logprobs or [], choice.token_ids, strict=False)
        logprobs = [candidates[token].logprob for candidates, token in chosen]
        answers.append(Answer(choice.token_ids, choice.text, choice.finish_reason or "", stop, logprobs))
    return answers


def _params(spec: RequestSpec, num_choices: int) -> list[SamplingParams]:
    from pagestream_worker.requests import child_of, sampling_of, sampling_of_child

    of_all = sampling_of(spec)
    return [sampling_of_child(of_all, child_of(spec, choice)) for choice in range(num_choices)]
