from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pagestream.v1.records_pb2 import ModelCard
from pagestream_gateway.core.models import LoadedModel, ModelCache, Models, load_model
from pagestream_gateway.core.redis_timeout import RedisTimeout
from pagestream_gateway.core.text.encoder import EncodingJob
from pagestream_gateway.core.text.encoding_cache import EncodingCache
from pagestream_gateway.core.tokenization import TokenizePool
from pagestream_gateway.errors import InvalidRequest, PromptTooLong
from pagestream_streams.errors import ModelNotFound
from support.engines.synthetic_engine import MODEL, byte_tokenizer, synthetic_card


def encoded(model: LoadedModel, text: str, *, adds: bool, limit: int) -> array[int]:
    """Return the ids of a text, as a request's."""
    job = model.check(EncodingJob(text, adds, limit, "prompt"))
    return model.ids_of(job, model.encoder.encode_batch([job], EncodingCache(0))[0])


def test_encodes_as_the_tokenizer_does() -> None:
    model = load_model(synthetic_card())
    for special in (True, False):
        ids = encoded(model, "Grüße 👋", adds=special, limit=100)
        assert list(ids) == byte_tokenizer().encode("Grüße 👋", add_special_tokens=special).ids
    assert model.decode(list(ids)) == "Grüße 👋"


def test_a_prompt_that_is_too_long_tells_the_numbers() -> None:
    with pytest.raises(PromptTooLong, match=r"maximum context length is 128 tokens.* 11 tokens") as caught:
        encoded(load_model(synthetic_card()), "x" * 10, adds=True, limit=10)
    assert caught.value.field == "prompt"


def test_half_a_surrogate_pair_is_not_text() -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        encoded(load_model(synthetic_card()), "\ud800", adds=True, limit=10)


@pytest.mark.parametrize("change", [{"tokenizer_json_zlib": b"x"}, {"chat_template": "{% for %}"}])
def test_a_broken_card_is_told(change: dict[str, object]) -> None:
    card = synthetic_card()
    card.MergeFrom(ModelCard(**change))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'synthetic' is broken"):
        load_model(card)


async def test_a_model_is_loaded_once_for_each_card() -> None:
    cache, loads = ModelCache(), []

    async def run(work: Callable[[], LoadedModel]) -> LoadedModel:
        loads.append(threading.get_ident())
        return await asyncio.to_thread(work)

    card = synthetic_card()
    first = await cache.load(card, run)
    assert await cache.load(card, run) is first
    assert await cache.load(synthetic_card(), run) is first
    shorter = await cache.load(synthetic_card(max_model_len=64), run)
    assert (shorter.max_model_len, shorter.tokenizer) == (64, first.tokenizer)
    exact = synthetic_card()
    exact.deterministic = True
    assert (await cache.load(exact, run)).card.deterministic
    assert len(loads) == 1
    card = synthetic_card()
    card.chat_template = "{{ messages }}"
    assert (await cache.load(card, run)).chat_template is not None
    assert len(loads) == 2


async def test_callers_that_come_together_share_one_load() -> None:
    cache, gate, loads = ModelCache(), asyncio.Event(), []

    async def run(work: Callable[[], LoadedModel]) -> LoadedModel:
        loads.append(work)
        await gate.wait()
        return work()

    callers = [asyncio.create_task(cache.load(synthetic_card(), run)) for _ in range(24)]
    await asyncio.sleep(0)
    callers[0].cancel()
    await asyncio.sleep(0)
    gate.set()
    first, *others = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert len(loads) == 1
    assert all(other is others[0] for other in others)
    assert await cache.load(synthetic_card(), run) is others[0]


async def test_a_load_that_failed_is_begun_again() -> None:
    cache, outcomes = ModelCache(), [RuntimeError("once"), asyncio.CancelledError(), None]

    async def run(work: Callable[[], LoadedModel]) -> LoadedModel:
        await asyncio.sleep(0)
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome
        return work()

    for kind in (RuntimeError, asyncio.CancelledError):
        failed = await asyncio.gather(*(cache.load(synthetic_card(), run) for _ in range(2)), return_exceptions=True)
        assert [type(error) for error in failed] == [kind, kind]
    assert (await cache.load(synthetic_card(), run)).name == synthetic_card().name
    assert not outcomes


async def test_cards_that_change_while_they_are_loaded() -> None:
    cache, gates = ModelCache(), [asyncio.Event(), asyncio.Event()]
    waiting = iter(gates)

    async def run(work: Callable[[], LoadedModel]) -> LoadedModel:
        await next(waiting).wait()
        return work()

    old = asyncio.create_task(cache.load(synthetic_card(), run))
    await asyncio.sleep(0)
    new = asyncio.create_task(cache.load(synthetic_card(max_model_len=64), run))
    await asyncio.sleep(0)
    gates[1].set()
    assert (await new).max_model_len == 64
    gates[0].set()
    assert (await old).max_model_len != 64


async def test_tokenizers_are_loaded_before_anybody_asks(caplog: pytest.LogCaptureFixture) -> None:
    """Each once, whatever else is published; a broken card is logged once and stops no other."""
    broken = synthetic_card()
    broken.MergeFrom(ModelCard(name="broken", tokenizer_json_zlib=b"x"))
    broker, cards = SimpleNamespace(), {"broken": broken, "gone": None, MODEL: synthetic_card()}
    broker.directory = SimpleNamespace(knows=lambda name: name in cards)

    async def model_card(name: str) -> ModelCard:
        if (card := cards[name]) is None:
            raise ModelNotFound(name)
        return card

    async def models() -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in cards]

    broker.model_card, broker.models = model_card, models
    async with TokenizePool(workers=1, max_pending=4, limit_s=10.0) as pool:
        known = Models(cast(Any, broker), pool, RedisTimeout(5.0))
        for _ in range(3):
            await known.preload()
        loaded = await known.resolve(MODEL)
        await known.preload()
        assert await known.resolve(MODEL) is loaded
    assert len([record for record in caplog.records if "broken" in record.getMessage()]) == 1
