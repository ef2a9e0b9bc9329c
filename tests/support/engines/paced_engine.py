"""An engine process without a model that gives every stream a token at a fixed rate, in steps of many streams.

    python -m paced_engine --redis URL --rate 5 --step 256 --tokens 50

It stands where a GPU would: claims, fenced appends and wake-ups are the real ones, only the tokens are made up. Every
`--report-s` seconds it prints a line of JSON: tokens so far, seconds of processor time, and how late its steps are.
"""

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

import uvloop
from pagestream.v1.inference_pb2 import FINISH_REASON_LENGTH, Usage
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry
from pagestream_streams import Append, AppendKind, Broker, Claim, EngineSession, StreamsSettings
from pagestream_streams.protocol import digests
from support.engines.synthetic_engine import MODEL, synthetic_card

MANY = 2**31


@dataclass
class Stream:
    """A claimed request and how far it is."""

    claim: Claim
    index: int = 0
    digest: str = ""

    def next_append(self) -> Append:
        """Return the next token, and after the last one the finish and the end."""
        spec = self.claim.spec
        if self.index < spec.sampling.max_tokens:
            entries = [LogEntry(token_id=10 + self.index % 26, text=chr(ord("a") + self.index % 26))]
        else:
            usage = Usage(prompt_tokens=len(spec.prompts[0].ids), completion_tokens=spec.sampling.max_tokens)
            finish = LogEntry(finish=ChoiceFinish(reason=FINISH_REASON_LENGTH))
            entries = [finish, LogEntry(end=LogEnd(reason=FINISH_REASON_LENGTH, usage=usage))]
        self.digest = digests.chained(self.digest, entries)[-1].digest
        first, self.index = self.index, self.index + len(entries)
        return Append(self.claim.request_id, self.claim.epoch, self.claim.nonce, first, entries)


class PacedEngine:
    """Turns round and round through its streams, `step` of them at a time."""

    def __init__(self, broker: Broker, *, rate: float, step: int) -> None:
        self._session = EngineSession(broker, model=MODEL, on_lost=self._drop)
        self._streams: deque[Stream] = deque()
        self._lost: set[str] = set()
        self._rate = rate
        self._step = step
        self.tokens = 0
        self.late_s = 0.0

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self._session:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._claim())
                tasks.create_task(self._generate())

    async def _claim(self) -> None:
        while True:
            claims = await self._session.claim(max_requests=256, max_prompt_tokens=MANY)
            self._streams.extend(Stream(claim) for claim in claims)
            if not claims:
                await self._session.wait_for_work(0.5)

    async def _generate(self) -> None:
        due = time.perf_counter()
        while True:
            if not self._streams:
                await asyncio.sleep(0.01)
                due = time.perf_counter()
                continue
            batch = [self._streams.popleft() for _ in range(min(self._step, len(self._streams)))]
            share = len(batch) / (len(batch) + len(self._streams))
            outcomes = await self._session.append([stream.next_append() for stream in batch])
            going = [
                stream
                for stream, outcome in zip(batch, outcomes, strict=True)
                if outcome.kind is AppendKind.OK and stream.index <= stream.claim.spec.sampling.max_tokens
            ]
            self._streams.extend(going)
            self.tokens += len(going)
            due += share / self._rate
            self.late_s = max(0.0, time.perf_counter() - due)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    def _drop(self, request_ids: Collection[str]) -> None:
        self._lost.update(request_ids)


async def serve(options: argparse.Namespace) -> None:
    """Publish the card, run, report."""
    async with await Broker.connect(options.redis, StreamsSettings()) as broker:
        await broker.publish_model(synthetic_card(max_model_len=4096))
        engine = PacedEngine(broker, rate=options.rate, step=options.step)
        task = asyncio.create_task(engine.run())
        print(json.dumps({"ready": True}), flush=True)
        while not task.done():
            await asyncio.wait([task], timeout=options.report_s)
            report = {"tokens": engine.tokens, "cpu_s": time.process_time(), "late_s": round(engine.late_s, 3)}
            print(json.dumps(report), flush=True)
        task.result()


def main() -> None:
    """Run until killed."""
    parser = argparse.ArgumentParser(description="An engine without a model.")
    parser.add_argument("--redis", required=True)
    parser.add_argument("--rate", type=float, default=5.0, help="tokens a second of each stream")
    parser.add_argument("--step", type=int, default=256, help="streams in a step, at most")
    parser.add_argument("--report-s", type=float, default=1.0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
