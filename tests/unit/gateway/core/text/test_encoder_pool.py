"""Drafts that wait are prepared in batches; one that fails, or is long, harms none of the others."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import AnswerForm
from pagestream_gateway.core.drafts import ChatPrompt, Draft, TextPrompt
from pagestream_gateway.core.models import LoadedModel, load_model
from pagestream_gateway.core.text.encoder import PIECE_CHARS, Encoded, EncodingJob
from pagestream_gateway.core.text.encoder_pool import EncoderPool
from pagestream_gateway.core.text.encoding_cache import EncodingCache
from pagestream_gateway.core.tokenization import TokenizePool
from pagestream_gateway.errors import InvalidRequest, Overloaded, PromptTooLong
from pagestream_gateway.settings import LimitSettings
from support.engines.synthetic_engine import synthetic_card

LIMITS = LimitSettings(tokenize_workers=1, tokenize_queue=40)
SYSTEM = {"role": "system", "content": "be kind " * 30}


class Threads:
    """A pool whose one thread is held until `open`."""

    def __init__(self, pool: TokenizePool) -> None:
        self.encoders = EncoderPool(pool, LIMITS)
        self._gate = threading.Event()
        pool.start(self._gate.wait)

    def open(self) -> None:
        self._gate.set()


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    async with TokenizePool(workers=1, max_pending=40, limit_s=20) as pool:
        held = Threads(pool)
        yield held
        held.open()


def model() -> LoadedModel:
    return load_model(synthetic_card(max_model_len=1000))


def chat(text: str) -> Draft:
    return draft(ChatPrompt([SYSTEM, {"role": "user", "content": text}]))


def draft(prompt: ChatPrompt | TextPrompt) -> Draft:
    return Draft(model="m", prompts=[prompt], prompt_field="p", sampling=SamplingParams(), answer=AnswerForm())


async def test_what_waits_is_encoded_together_and_the_failing_fail_alone(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, batches = model(), list[int]()
    encode_batch = made.encoder.encode_batch

    def counted(jobs: list[EncodingJob], cache: EncodingCache) -> list[Encoded]:
        batches.append(len(jobs))
        return encode_batch(jobs, cache)

    monkeypatch.setattr(made.encoder, "encode_batch", counted)
    drafts = [chat(f"hello {number}") for number in range(20)]
    drafts[3] = draft(ChatPrompt([]))
    drafts[5] = draft(TextPrompt("\ud800"))
    drafts[7] = draft(TextPrompt("x" * 2000))
    drafts[9] = draft(TextPrompt("y" * (PIECE_CHARS + 1)))
    calls = [asyncio.create_task(threads.encoders.prepare(each, made, b"")) for each in drafts]
    await asyncio.sleep(0)
    threads.open()
    found = await asyncio.gather(*calls, return_exceptions=True)
    kinds = {number: type(each) for number, each in enumerate(found) if isinstance(each, Exception)}
    assert kinds == {3: InvalidRequest, 5: InvalidRequest, 7: PromptTooLong, 9: PromptTooLong}
    assert batches == [17, 1], "the long one comes after the others"
    rendered = f"<s>[system]{SYSTEM['content']}</s>[user]hello 0</s>[assistant]"
    assert not isinstance(found[0], BaseException)
    assert list(found[0].prompts[0]) == made.tokenizer.encode(rendered, add_special_tokens=False).ids


async def test_a_text_that_the_tokenizer_fails_on_fails_alone(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model()
    encode_batch = made.encoder.encode_batch

    def broken(jobs: list[EncodingJob], cache: EncodingCache) -> list[Encoded]:
        if any("bad" in job.text for job in jobs):
            raise ValueError("a defect")
        return encode_batch(jobs, cache)

    monkeypatch.setattr(made.encoder, "encode_batch", broken)
    calls = [asyncio.create_task(threads.encoders.prepare(chat(text), made, b"")) for text in ("a", "bad", "c")]
    await asyncio.sleep(0)
    threads.open()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(each) is ValueError for each in found] == [False, True, False]


async def test_what_waits_is_bounded_and_room_comes_back(threads: Threads) -> None:
    made = model()
    calls = [asyncio.create_task(threads.encoders.prepare(chat("x"), made, b"")) for _ in range(LIMITS.tokenize_queue)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="at most 40"):
        await threads.encoders.prepare(chat("x"), made, b"")
    calls[0].cancel()
    threads.open()
    await asyncio.wait(calls)
    assert [each.cancelled() for each in calls] == [True] + [False] * (len(calls) - 1)
    assert (await threads.encoders.prepare(chat("x"), made, b"")).prompts
    assert threads.encoders.cache.num_hits, "the system prompt of those before"
