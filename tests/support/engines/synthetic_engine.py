"""An engine without scheduler and model: real claims and appends, answers that are a function of the request alone.

In a test's process it stands for engines where gateways and clients are tested: it answers at once, can hold a stream
at any entry, and any instance goes on with any request, as engines with one model do. As a process it gives thousands
of streams a token at a fixed rate, for measurements of gateways that no engine on a CPU could feed:

    python -m support.engines.synthetic_engine --redis URL --rate 5 --step 256

Every `--report-s` seconds that process prints a line of JSON: tokens so far, seconds of processor time, and how late
its steps are.
"""

import argparse
import asyncio
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice

import uvloop
from pagestream.v1.inference_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    RequestError,
    Usage,
)
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, ModelCard, RequestSpec
from pagestream_streams import Append, AppendKind, Broker, Claim, EngineSession, Unavailable
from pagestream_streams.protocol import chain
from pagestream_streams.tasks import cancel, raise_if_cancelled
from support.engines.tokenizers import byte_level
from support.processes.waiting import until
from support.protocol.token_streams import append_of, eventually
from tokenizers import AddedToken, Tokenizer, processors

MODEL = "synthetic"
ECHO_MODEL = "synthetic-echo"
"""Models whose names begin so write what the prompt has between `[say]` and `[said]`, and stop; a character a token."""
MAX_MODEL_LEN = 128
REASONING_MARKS = ("<think>", "</think>")
"""Words that are tokens of cards made with them."""
FINGERPRINT = "synthetic"
FAILING_TOKEN = 7
"""A prompt that holds this token id fails in the engine."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
Says = Callable[[RequestSpec], str | None]
_RETRY_S = 0.05
_WAIT_S = 1.0
_ANY_TOKENS = 2**31


def byte_tokenizer(words: Sequence[str] = (), specials: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with one token for each byte, after <s>, </s> and eight unused ones.

    `words` and `specials` are tokens, too; these are special ones.
    """
    tokenizer = byte_level(["<s>", "</s>", *(f"<unused{number}>" for number in range(8))])
    tokenizer.add_special_tokens(list(specials))
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def synthetic_card(
    name: str = MODEL,
    *,
    max_model_len: int = MAX_MODEL_LEN,
    chat_template: str = CHAT_TEMPLATE,
    words: Sequence[str] = (),
    specials: Sequence[str] = (),
) -> ModelCard:
    """Return the card of a model with that tokenizer."""
    tokenizer = byte_tokenizer(words, specials)
    return ModelCard(
        name=name,
        tokenizer_json_zlib=zlib.compress(tokenizer.to_str().encode()),
        chat_template=chat_template,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        max_model_len=max_model_len,
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=[1],
        architecture="Synthetic",
        takes_output_constraints=True,
    )


def tokenizer_of(card: ModelCard) -> Tokenizer:
    """Return the tokenizer that a card holds."""
    return Tokenizer.from_str(zlib.decompress(card.tokenizer_json_zlib).decode())


def answer_text(spec: RequestSpec, choice: int) -> str:
    """Return the text of a choice: one letter for each token."""
    return "".join(_letter(spec, choice, place) for place in range(spec.sampling.max_tokens))


def answer_entries(spec: RequestSpec, says: Says | None = None) -> Iterator[LogEntry]:
    """Yield the whole log of a request: the choices' tokens in turn, their finishes, the end."""
    digest = ""
    for entry in _entries(spec, says or _said):
        digest = entry.digest = chain(digest, entry)
        yield entry


def _entries(spec: RequestSpec, says: Says) -> Iterator[LogEntry]:
    num_choices, num_tokens = len(spec.prompts) * max(1, spec.sampling.n), spec.sampling.max_tokens
    usage = Usage(prompt_tokens=sum(len(prompt.ids) for prompt in spec.prompts))
    if any(FAILING_TOKEN in prompt.ids for prompt in spec.prompts):
        error = RequestError(code="engine_error", message="the synthetic engine was told to fail")
        for choice in range(num_choices):
            yield LogEntry(choice=choice, finish=ChoiceFinish(reason=FINISH_REASON_ERROR))
        yield LogEntry(end=LogEnd(reason=FINISH_REASON_ERROR, usage=usage, error=error, ended_at=int(time.time())))
        return
    said = says(spec)
    if said is not None:
        num_tokens = min(num_tokens, len(said))
    for place in range(num_tokens):
        for choice in range(num_choices):
            text = _letter(spec, choice, place) if said is None else said[place]
            yield LogEntry(choice=choice, token_id=10 + place, text=text)
    has_stopped = spec.sampling.stop or num_tokens < spec.sampling.max_tokens
    reason = FINISH_REASON_STOP if has_stopped else FINISH_REASON_LENGTH
    finish = ChoiceFinish(reason=reason, stop_reason=spec.sampling.stop[0] if spec.sampling.stop else "")
    for choice in range(num_choices):
        yield LogEntry(choice=choice, finish=finish)
    usage.completion_tokens = num_choices * num_tokens
    yield LogEntry(end=LogEnd(reason=reason, usage=usage, ended_at=int(time.time())))


class Stream:
    """A claimed request, and the entry that its log gets next."""

    def __init__(self, claim: Claim, says: Says | None = None) -> None:
        self.claim = claim
        self._says = says
        self.entry: LogEntry | None
        self.go_to(claim.next_index)

    def go_to(self, index: int) -> None:
        """Make the entry of this index the next one."""
        self._entries = islice(answer_entries(self.claim.spec, self._says), max(0, index - 1), None)
        self._digest = next(self._entries).digest if index else ""
        self.index = index
        self.entry = next(self._entries, None)

    def advance(self) -> None:
        """Go on to the next entry; `entry` is None after the last one."""
        self.index += 1
        self._digest = "" if self.entry is None else self.entry.digest
        self.entry = next(self._entries, None)

    def append(self) -> Append:
        """Return the append of the next entry."""
        entries = [] if self.entry is None else [self.entry]
        return append_of(self.claim, self.index, entries, previous_digest=self._digest)


class SyntheticEngine:
    """Appends one entry of each of its streams in a step, of at most `step` streams; `running_engine` owns it.

    Args:
        broker: the connection.
        card: of the model that it serves.
        rate: tokens a second of each stream; None: as fast as Redis answers.
        step: most streams of a step.
        says: the text that answers a request, which then stops; a function of the request alone. None: letters.
    """

    def __init__(
        self,
        broker: Broker,
        card: ModelCard,
        *,
        rate: float | None = None,
        step: int = 256,
        says: Says | None = None,
    ) -> None:
        self.hold_at: int | None = None
        """Streams stop before the log entry with this index until `go_on`."""
        self.claimed: list[RequestSpec] = []
        self.lost: set[str] = set()
        self.num_tokens = 0
        self.late_s = 0.0
        """How much later than `rate` asks the last step ended."""
        self._rate = rate
        self._step = step
        self._says = says
        self._streams: dict[str, Stream] = {}
        self._has_work = asyncio.Event()
        self._session = EngineSession(broker, model=card.name, on_lost=self._drop, fingerprint=FINGERPRINT)

    @property
    def num_held(self) -> int:
        """Streams that have come to `hold_at`."""
        return sum(self.hold_at is not None and each.index >= self.hold_at for each in self._streams.values())

    def go_on(self, hold_at: int | None = None) -> None:
        """Let streams that are held, and all later ones, run to the entry `hold_at`; None: to their end."""
        self.hold_at = hold_at
        self._has_work.set()

    def forget(self) -> None:
        """Begin to count anew."""
        self.claimed.clear()
        self.lost.clear()
        self.num_tokens = 0

    async def finish(self) -> None:
        """Let all streams run to their end, and wait for that."""
        self.go_on()
        await until(lambda: not self._streams, "the streams' ends")

    async def run(self) -> None:
        """Serve until cancelled."""
        async with self._session, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._claim_forever())
            tasks.create_task(self._step_forever())

    async def _claim_forever(self) -> None:
        while True:
            raise_if_cancelled()  # a task group cancels once, and redis-py may swallow that
            try:
                claims = await self._session.claim(max_requests=256, max_prompt_tokens=_ANY_TOKENS)
            except Unavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            for claim in claims:
                self.claimed.append(claim.spec)
                self._streams[claim.request_id] = Stream(claim, self._says)
                self._has_work.set()
            if not claims:
                await self._session.wait_for_work(_WAIT_S)

    async def _step_forever(self) -> None:
        due = time.perf_counter()
        while True:
            raise_if_cancelled()
            batch = self._next_batch()
            if not batch:
                self._has_work.clear()
                await self._has_work.wait()
                due = time.perf_counter()
                continue
            share = len(batch) / len(self._streams)
            await self._append(batch)
            if self._rate is not None:
                due += share / self._rate
                self.late_s = max(0.0, time.perf_counter() - due)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))

    def _next_batch(self) -> list[Stream]:
        """Return the streams of the next step, those that waited longest first."""
        hold_at = self.hold_at
        running = (each for each in self._streams.values() if hold_at is None or each.index < hold_at)
        batch = list(islice(running, self._step))
        if len(batch) < len(self._streams):
            for stream in batch:  # to the end of the order
                self._streams[stream.claim.request_id] = self._streams.pop(stream.claim.request_id)
        return batch

    async def _append(self, batch: Sequence[Stream]) -> None:
        try:
            outcomes = await self._session.append([stream.append() for stream in batch])
        except Unavailable:
            await asyncio.sleep(_RETRY_S)
            return
        for stream, outcome in zip(batch, outcomes, strict=True):
            if self._streams.get(stream.claim.request_id) is not stream:
                continue  # lost meanwhile
            if outcome.lost:
                self._drop([stream.claim.request_id])
            elif outcome.kind is AppendKind.GAP:
                stream.go_to(outcome.next_index)
            elif outcome.kind is AppendKind.OK:
                self._take(stream)

    def _take(self, stream: Stream) -> None:
        self.num_tokens += stream.entry is not None and stream.entry.HasField("token_id")
        stream.advance()
        if stream.entry is None:
            del self._streams[stream.claim.request_id]

    def _drop(self, request_ids: Collection[str]) -> None:
        self.lost.update(request_ids)
        for request_id in request_ids:
            self._streams.pop(request_id, None)


@asynccontextmanager
async def running_engine(
    redis_url: str, card: ModelCard | None = None, *, says: Says | None = None
) -> AsyncIterator[SyntheticEngine]:
    """Publish the card and serve it for the length of a block, which begins once the engine is in the registry."""
    card = card or synthetic_card()
    async with await Broker.connect(redis_url) as broker:
        await broker.publish_model(card)
        engine = SyntheticEngine(broker, card, says=says)
        task = asyncio.create_task(engine.run())
        try:
            await eventually(lambda: _is_registered(broker, card.name))
            yield engine
        finally:
            await cancel(task)


async def _is_registered(broker: Broker, name: str) -> bool:
    return any(info.name == name and info.engines for info in await broker.models())


async def _serve(options: argparse.Namespace) -> None:
    """Publish the card, serve, and print reports."""
    card = synthetic_card(options.name, max_model_len=options.max_model_len)
    async with await Broker.connect(options.redis) as broker:
        await broker.publish_model(card)
        engine = SyntheticEngine(broker, card, rate=options.rate, step=options.step)
        task = asyncio.create_task(engine.run())
        print(json.dumps({"ready": True}), flush=True)
        while not task.done():
            await asyncio.wait([task], timeout=options.report_s)
            report = {"tokens": engine.num_tokens, "cpu_s": time.process_time(), "late_s": round(engine.late_s, 3)}
            print(json.dumps(report), flush=True)
        task.result()


def main() -> None:
    """Run until killed."""
    parser = argparse.ArgumentParser(description="An engine without a model.")
    parser.add_argument("--redis", required=True)
    parser.add_argument("--rate", type=float, default=5.0, help="tokens a second of each stream")
    parser.add_argument("--step", type=int, default=256, help="streams in a step, at most")
    parser.add_argument("--name", default=MODEL, help="of the model")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--report-s", type=float, default=1.0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(parser.parse_args()))


def _said(spec: RequestSpec) -> str | None:
    """Return the text that the echoing model writes; None for another model."""
    if not spec.model.startswith(ECHO_MODEL):
        return None
    prompt: str = byte_tokenizer(REASONING_MARKS).decode(list(spec.prompts[0].ids))
    return prompt.rpartition("[say]")[2].partition("[said]")[0]


def _letter(spec: RequestSpec, choice: int, place: int) -> str:
    return chr(ord("a") + (spec.sampling.seed + 7 * choice + place) % 26)


if __name__ == "__main__":
    main()
