"""A process without a model that writes whole logs as fast as Redis takes them, for measurements of memory.

A token's text is its number, and it has the log probabilities that its request asks for. Requests take turns. A request
that another engine has begun is written again from its start, which its log skips.

    PYTHONPATH=tests python -m campaigns.bulk_engine --redis URL
"""

import argparse
import asyncio
import json
from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice

import uvloop
from pagestream.v1.inference_pb2 import FINISH_REASON_LENGTH, LogprobEntry, TokenLogprobs, Usage
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, RequestSpec
from pagestream_streams import Append, AppendKind, Broker, Claim, EngineSession, Unavailable
from pagestream_streams.protocol.records import chain
from support.engines.synthetic_engine import synthetic_card
from support.protocol.token_streams import append_of

MODEL = "bulk"
MAX_MODEL_LEN = 2**20
_CLAIM_AT_ONCE = 256
_ENTRIES_AT_ONCE = 512  # of one append, of all its requests
_SLICE = 128  # entries of one request in an append
_WAIT_S = 1.0
_RETRY_S = 0.05


def token_text(place: int) -> str:
    """Return the text of a choice's token."""
    return f" {place}"


def entries_of(spec: RequestSpec) -> Iterator[LogEntry]:
    """Yield a request's log: its choices' tokens in turn, their finishes, the end."""
    num_choices, digest = len(spec.prompts) * max(1, spec.sampling.n), ""
    for entry in _entries(spec, num_choices):
        digest = entry.digest = chain(digest, entry)
        yield entry


def _entries(spec: RequestSpec, num_choices: int) -> Iterator[LogEntry]:
    logprobs = _logprobs(spec.sampling.logprobs) if spec.sampling.HasField("logprobs") else None
    for place in range(spec.sampling.max_tokens):
        for choice in range(num_choices):
            yield LogEntry(choice=choice, token_id=10 + place % 200, text=token_text(place), logprobs=logprobs)
    for choice in range(num_choices):
        yield LogEntry(choice=choice, finish=ChoiceFinish(reason=FINISH_REASON_LENGTH))
    usage = Usage(
        prompt_tokens=sum(len(prompt.ids) for prompt in spec.prompts),
        completion_tokens=num_choices * spec.sampling.max_tokens,
    )
    yield LogEntry(end=LogEnd(reason=FINISH_REASON_LENGTH, usage=usage))


def _logprobs(num_best: int) -> TokenLogprobs:
    best = [LogprobEntry(token_id=10 + r, logprob=-1.5 - r, rank=r + 1, text=" word") for r in range(num_best + 1)]
    return TokenLogprobs(entries=best)


class _Slices:
    """A log in slices, made once for all requests whose logs are alike."""

    def __init__(self, spec: RequestSpec) -> None:
        self._entries = entries_of(spec)
        self._made: list[list[LogEntry]] = []

    def __getitem__(self, number: int) -> list[LogEntry]:
        while len(self._made) <= number:
            self._made.append(list(islice(self._entries, _SLICE)))
        return self._made[number]


class _Log:
    """A claimed request's log, as far as it is written."""

    def __init__(self, claim: Claim, slices: _Slices) -> None:
        self.claim = claim
        self._slices = slices
        self._number = 0
        self._next = slices[0]
        self._index, self._digest = 0, ""

    def append(self) -> Append:
        """Return the next append; the same one until `settle`."""
        claim = self.claim
        return append_of(claim, self._index, self._next, previous_digest=self._digest)

    def settle(self) -> bool:
        """Go on behind the append; return whether the log has ended."""
        last = self._next[-1]
        self._index, self._digest = self._index + len(self._next), last.digest
        self._number += 1
        if last.HasField("end"):
            return True
        self._next = self._slices[self._number]
        return False


class BulkEngine:
    """Claims everything, and writes it."""

    def __init__(self, broker: Broker) -> None:
        self._session = EngineSession(broker, model=MODEL, on_lost=self._drop)
        self._logs: deque[_Log] = deque()
        self._made: dict[tuple[int, ...], _Slices] = {}
        self._has_work = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self._session, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._claim_forever())
            tasks.create_task(self._write_forever())

    async def _claim_forever(self) -> None:
        while True:
            try:
                claims = await self._session.claim(max_requests=_CLAIM_AT_ONCE, max_prompt_tokens=2**31)
            except Unavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            self._logs.extend(_Log(claim, self._slices_of(claim.spec)) for claim in claims)
            if claims:
                self._has_work.set()
            else:
                await self._session.wait_for_work(_WAIT_S)

    async def _write_forever(self) -> None:
        while True:
            if not self._logs:
                self._has_work.clear()
                await self._has_work.wait()
            batch = [self._logs.popleft() for _ in range(min(len(self._logs), _ENTRIES_AT_ONCE // _SLICE))]
            try:
                outcomes = await self._session.append([each.append() for each in batch])
            except Unavailable:
                self._logs.extend(batch)
                await asyncio.sleep(_RETRY_S)
                continue
            for each, outcome in zip(batch, outcomes, strict=True):
                if outcome.kind is AppendKind.AWAY or (outcome.kind is AppendKind.OK and not each.settle()):
                    self._logs.append(each)

    def _slices_of(self, spec: RequestSpec) -> _Slices:
        sampling = spec.sampling
        logprobs = sampling.logprobs if sampling.HasField("logprobs") else -1
        form = (len(spec.prompts), len(spec.prompts[0].ids), sampling.n, sampling.max_tokens, logprobs)
        return self._made.setdefault(form, _Slices(spec))

    def _drop(self, request_ids: Collection[str]) -> None:
        self._logs = deque(each for each in self._logs if each.claim.request_id not in request_ids)


async def _serve(redis_url: str) -> None:
    async with await Broker.connect(redis_url) as broker:
        await broker.publish_model(synthetic_card(MODEL, max_model_len=MAX_MODEL_LEN))
        print(json.dumps({"ready": True}), flush=True)
        await BulkEngine(broker).run()


def main() -> None:
    """Run until killed."""
    parser = argparse.ArgumentParser(description="An engine without a model that writes whole logs.")
    parser.add_argument("--redis", required=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(parser.parse_args().redis))


if __name__ == "__main__":
    main()
