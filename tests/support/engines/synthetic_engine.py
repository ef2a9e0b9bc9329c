"""An engine without a model: it claims from the real queue and appends to the real logs, and its answers are made up.

Each answer is a function of the request alone, as a model's is, so any engine goes on with any request.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from pagestream.v1.inference_pb2 import (
    FINISH_REASON_ERROR,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    RequestError,
    Usage,
)
from pagestream.v1.records_pb2 import ChoiceFinish, LogEnd, LogEntry, ModelCard, RequestSpec
from pagestream_streams import Append, AppendKind, Broker, Claim, EngineSession, Unavailable
from pagestream_streams.protocol import digests
from pagestream_streams.tasks import cancel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

MODEL = "synthetic"
MAX_MODEL_LEN = 128
FAILING_TOKEN = 7
"""A prompt that holds this token id fails in the engine."""
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
_RETRY_S = 0.05
_WAIT_S = 1.0


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, after <s>, </s> and eight unused ones."""
    specials = ["<s>", "</s>", *(f"<unused{number}>" for number in range(8))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(specials)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return tokenizer


def synthetic_card(
    name: str = MODEL, *, max_model_len: int = MAX_MODEL_LEN, chat_template: str = CHAT_TEMPLATE
) -> ModelCard:
    """The card of a model whose prompts are bytes."""
    tokenizer = byte_tokenizer()
    return ModelCard(
        name=name,
        tokenizer_json_zlib=zlib.compress(tokenizer.to_str().encode()),
        chat_template=chat_template,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        max_model_len=max_model_len,
        vocab_size=tokenizer.get_vocab_size(),
        eos_token_ids=[1],
        architecture="Synthetic",
    )


def answer_text(spec: RequestSpec, choice: int) -> str:
    """What a choice says: a letter for each token."""
    return "".join(_letter(spec, choice, place) for place in range(spec.sampling.max_tokens))


def answer_entries(spec: RequestSpec) -> list[LogEntry]:
    """The whole log of a request: choices in turn, their finishes, the end."""
    num_choices, num_tokens = len(spec.prompts) * spec.sampling.n, spec.sampling.max_tokens
    usage = Usage(prompt_tokens=sum(len(prompt.ids) for prompt in spec.prompts))
    if any(FAILING_TOKEN in prompt.ids for prompt in spec.prompts):
        error = RequestError(code="engine_error", message="the synthetic engine was told to fail")
        finishes = [
            LogEntry(choice=choice, finish=ChoiceFinish(reason=FINISH_REASON_ERROR)) for choice in range(num_choices)
        ]
        end = LogEntry(end=LogEnd(reason=FINISH_REASON_ERROR, usage=usage, error=error))
        return digests.chained("", [*finishes, end])
    entries = [
        LogEntry(choice=choice, token_id=10 + place, text=_letter(spec, choice, place))
        for place in range(num_tokens)
        for choice in range(num_choices)
    ]
    reason = FINISH_REASON_STOP if spec.sampling.stop else FINISH_REASON_LENGTH
    finish = ChoiceFinish(reason=reason, stop_reason=spec.sampling.stop[0] if spec.sampling.stop else "")
    entries += [LogEntry(choice=choice, finish=finish) for choice in range(num_choices)]
    usage.completion_tokens = num_choices * num_tokens
    return digests.chained("", [*entries, LogEntry(end=LogEnd(reason=reason, usage=usage))])


class SyntheticEngine:
    """Owned by `running_engine`."""

    def __init__(self, broker: Broker, card: ModelCard) -> None:
        self.hold_at: int | None = None
        """Requests stand still before the log entry with this index, until `go_on`."""
        self.claimed: list[RequestSpec] = []
        self.lost: set[str] = set()
        self._go = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._session = EngineSession(broker, model=card.name, on_lost=self._drop)

    def go_on(self) -> None:
        """Lets requests that stand still, and all later ones, run to their end."""
        self.hold_at = None
        self._go.set()

    async def run(self) -> None:
        """Serves until cancelled."""
        async with self._session:
            try:
                while True:
                    for claim in await self._claims():
                        self.claimed.append(claim.spec)
                        self._tasks[claim.request_id] = asyncio.create_task(self._generate(claim))
                    await self._session.wait_for_work(_WAIT_S)
            finally:
                for generating in self._tasks.values():
                    generating.cancel()
                for generating in self._tasks.values():
                    await cancel(generating)

    async def _claims(self) -> list[Claim]:
        try:
            return await self._session.claim(max_requests=64, max_prompt_tokens=1_000_000)
        except Unavailable:
            await asyncio.sleep(_RETRY_S)
            return []

    async def _generate(self, claim: Claim) -> None:
        entries = answer_entries(claim.spec)
        index = claim.next_index
        while index < len(entries):
            if self.hold_at is not None and index >= self.hold_at:
                await self._go.wait()
            append = Append(claim.request_id, claim.epoch, claim.nonce, index, [entries[index]])
            try:
                [outcome] = await self._session.append([append])
            except Unavailable:
                await asyncio.sleep(_RETRY_S)
                continue
            if outcome.lost:
                self.lost.add(claim.request_id)
                return
            index = outcome.next_index if outcome.kind is AppendKind.GAP else index + 1

    def _drop(self, request_ids: Collection[str]) -> None:
        self.lost.update(request_ids)
        for request_id in request_ids:
            task = self._tasks.pop(request_id, None)
            if task is not None:
                task.cancel()


@asynccontextmanager
async def running_engine(redis_url: str, card: ModelCard | None = None) -> AsyncIterator[SyntheticEngine]:
    """Publishes the card and serves it for the length of a block."""
    card = card or synthetic_card()
    async with await Broker.connect(redis_url) as broker:
        await broker.publish_model(card)
        engine = SyntheticEngine(broker, card)
        task = asyncio.create_task(engine.run())
        try:
            yield engine
        finally:
            await cancel(task)


def _letter(spec: RequestSpec, choice: int, place: int) -> str:
    return chr(ord("a") + (spec.sampling.seed + 7 * choice + place) % 26)
