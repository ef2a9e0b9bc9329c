"""`pagestream replay`: generate a past request again and compare.

The running deployment generates a copy (`by_deployment`), or this process does (`offline`). Answers are compared
choice by choice; one that was cut short is compared up to its end.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagestream_cli import store
from pagestream_cli.console import say
from pagestream_cli.errors import CliError, ReplayFailedError

if TYPE_CHECKING:
    from pagestream.v1.records_pb2 import LogEntry, RequestSpec
    from pagestream_engine import SamplingParams
    from pagestream_streams import Broker, GatewaySession

EQUAL, DIFFERENT, TROUBLE = 0, 1, 2
READ_LIMIT_S = 30.0
COPY_LIMIT_S = 300.0
QUARANTINED = "quarantined"  # error code at the end of the log of a quarantined request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of replay."""
    parser.epilog = "Exit code: 0 equal, 1 different, 2 it could not be compared."
    parser.add_argument("request_id", metavar="ID", help="a finished request whose log is still kept")
    parser.add_argument(
        "--tenant", metavar="NAME", default="default", help="tenant of the request (default: %(default)s)"
    )
    store.add_arguments(parser)
    parser.add_argument(
        "--model",
        metavar="FOLDER",
        help="generate in this process from this model folder (default: the running deployment generates a copy)",
    )
    parser.add_argument("--dtype", default="auto", help="with --model: that of the engine (default: %(default)s)")
    parser.add_argument("--deterministic", action="store_true", help="with --model: where the engine had it")
    parser.add_argument(
        "--limit",
        metavar="SECONDS",
        type=float,
        default=COPY_LIMIT_S,
        help="without --model: longest wait for the copy (default: %(default)g)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Replay and compare. The exit code is that of diff: 0 equal, 1 different, 2 not comparable.

    Raises:
        CliError: Redis does not answer, the request is not there or has not ended, or it can't be generated again.
    """
    try:
        recorded, again = asyncio.run(_both(arguments))
    except CliError as error:
        error.exit_code = TROUBLE
        raise
    return _report(recorded, again)


async def _both(arguments: argparse.Namespace) -> tuple[list[Answer], list[Answer]]:

    async with store.opened(store.redis_url(arguments)) as broker:
        spec, entries = await _recorded(broker, arguments.request_id, arguments.tenant)
        if arguments.model is None and entries[-1].end.error.code == QUARANTINED:
            raise ReplayFailedError(
                f"{spec.request_id} is quarantined: engines died while they computed it, and would again",
                hint=f"generate here with --model FOLDER, or requeue it: pagestream dead requeue {spec.request_id}",
            )
        if spec.HasField("pooling"):
            raise ReplayFailedError(f"{spec.request_id} is a request for vectors: it has no tokens to compare")
        recorded = read_log(spec, entries)
        spec = bounded(spec, recorded)
        say(f"{spec.request_id}: {sum(len(answer.token_ids) for answer in recorded)} tokens of {spec.model}, again ...")
        if arguments.model is None:
            return recorded, await by_deployment(broker, spec, arguments.limit)
    return recorded, offline(spec, arguments.model, dtype=arguments.dtype, deterministic=arguments.deterministic)


async def _recorded(broker: Broker, request_id: str, tenant: str) -> tuple[RequestSpec, list[LogEntry]]:
    from pagestream.v1.inference_pb2 import REQUEST_STATE_FINISHED
    from pagestream_streams import GatewaySession

    view = await broker.view(request_id, tenant)
    if view.state != REQUEST_STATE_FINISHED:
        raise ReplayFailedError(f"{request_id} has not ended yet", hint="replay it when it has")
    async with GatewaySession(broker, "replay", serves=False) as session:
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                return view.spec, await whole_log(session, request_id, tenant)
        except TimeoutError as error:
            raise ReplayFailedError(f"the log of {request_id} did not come within {READ_LIMIT_S:g} s") from error


def _report(recorded: list[Answer], again: list[Answer]) -> int:
    difference = first_difference(recorded, again)
    if difference is not None:
        print(f"different: {difference}")
        return DIFFERENT
    cut = sum(answer.is_cut_short for answer in recorded)
    tokens = sum(len(answer.token_ids) for answer in recorded)
    print(f"equal: {tokens} tokens in {len(recorded)} {'choice' if len(recorded) == 1 else 'choices'}")
    if cut:
        say(f"{cut} of them had been cut short (cancelled, deadline or error) and were compared as far as they went")
    gap = largest_gap(recorded, again)
    if gap is not None:
        say(f"log probabilities of the chosen tokens differ by at most {gap:.2g}")
    return EQUAL


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


CUT_SHORT = ("cancelled", "deadline", "error")
"""Finish reasons that do not follow from the tokens: generated again, the choice would continue."""


@dataclass
class Answer:
    """One choice of an answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    """Empty where the request ended before the choice did."""
    stop_reason: str = ""
    logprobs: list[float] = field(default_factory=list)
    """Of each chosen token, where they were asked for."""

    @property
    def is_cut_short(self) -> bool:
        """Whether it ended for a reason other than its tokens."""
        return self.finish_reason in ("", *CUT_SHORT)


def read_log(spec: RequestSpec, entries: Iterable[LogEntry]) -> list[Answer]:
    """Return the choices in a request's log, by number."""
    from pagestream_streams.protocol.records import finish_reason_name

    answers = [Answer() for _ in range(len(spec.prompts) * max(1, spec.sampling.n))]
    for entry in entries:
        answer = answers[entry.choice]
        match entry.WhichOneof("body"):
            case "token_id":
                answer.token_ids.append(entry.token_id)
                if entry.logprobs.entries:
                    answer.logprobs.append(entry.logprobs.entries[0].logprob)
            case "finish":
                answer.finish_reason = finish_reason_name(entry.finish.reason)
                answer.stop_reason = entry.finish.stop_reason
            case _:
                continue
        answer.text += entry.text
    return answers


@dataclass(frozen=True)
class Difference:
    """The first place where a choice differs."""

    choice: int
    what: str
    """"token 17" (counted from 0), "text", "finish reason", ..."""
    recorded: str
    again: str

    def __str__(self) -> str:
        return f"choice {self.choice}, {self.what}: recorded {self.recorded}, generated again {self.again}"


def first_difference(recorded: Sequence[Answer], again: Sequence[Answer]) -> Difference | None:
    """Return the first difference of the first choice that has one; None where all are equal.

    A recorded choice that was cut short is compared up to its end.
    """
    for number, (before, after) in enumerate(zip(recorded, again, strict=True)):
        difference = _difference(number, before, after)
        if difference is not None:
            return difference
    return None


def largest_gap(recorded: Sequence[Answer], again: Sequence[Answer]) -> float | None:
    """Return the largest difference between log probabilities of chosen tokens; None where none were requested."""
    gaps = [
        abs(first - second)
        for before, after in zip(recorded, again, strict=True)
        for first, second in zip(before.logprobs, after.logprobs, strict=False)
    ]
    return max(gaps, default=None)


def _difference(number: int, before: Answer, after: Answer) -> Difference | None:
    for place, token in enumerate(before.token_ids):
        other = after.token_ids[place] if place < len(after.token_ids) else None
        if other != token:
            return Difference(number, f"token {place}", str(token), "its end" if other is None else str(other))
    if before.is_cut_short:
        return None  # text may have been held back at the cut
    if len(after.token_ids) > len(before.token_ids):
        place = len(before.token_ids)
        return Difference(number, f"token {place}", "its end", str(after.token_ids[place]))
    for what, first, second in (
        ("text", before.text, after.text),
        ("finish reason", before.finish_reason, after.finish_reason),
        ("stop reason", before.stop_reason, after.stop_reason),
    ):
        if first != second:
            return Difference(number, what, repr(first), repr(second))
    return None
