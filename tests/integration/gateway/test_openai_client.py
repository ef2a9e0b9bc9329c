"""The official client against a gateway."""

import openai
import pytest
from openai import AsyncOpenAI
from support.clients.gateway_clients import Address
from support.engines.synthetic_engine import MODEL, SyntheticEngine, answer_text

MESSAGES = [{"role": "user", "content": "hello"}]


def client(gateway: Address) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0)


async def test_models(gateway: Address) -> None:
    async with client(gateway) as api:
        assert [model.id for model in (await api.models.list()).data] == [MODEL]
        assert (await api.models.retrieve(MODEL)).object == "model"
        with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
            await api.models.retrieve("other")


async def test_chat_answers_at_once(gateway: Address, engine: SyntheticEngine) -> None:
    async with client(gateway) as api:
        answer = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, seed=3, n=2)
    [spec] = engine.claimed
    assert answer.id == spec.request_id
    assert answer.object == "chat.completion"
    assert [choice.message.content for choice in answer.choices] == ["defgh", "klmno"]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.usage.prompt_tokens == len(spec.prompts[0].ids)
    assert answer.usage.total_tokens == 10 + len(spec.prompts[0].ids)


async def test_chat_streams(gateway: Address, engine: SyntheticEngine) -> None:
    async with client(gateway) as api:
        stream = await api.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=9, seed=1, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == "bcdefghij"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == ["length"]
    assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == [9]
    assert chunks[-1].choices == []


async def test_completions_take_lists_and_n(gateway: Address, engine: SyntheticEngine) -> None:
    async with client(gateway) as api:
        answer = await api.completions.create(model=MODEL, prompt=["one", "two"], n=2, max_tokens=3, seed=0, echo=True)
    assert [choice.text for choice in answer.choices] == ["oneabc", "onehij", "twoopq", "twovwx"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.object == "text_completion"


async def test_completions_stream_echo_first(gateway: Address) -> None:
    async with client(gateway) as api:
        stream = await api.completions.create(model=MODEL, prompt="one ", max_tokens=3, seed=0, echo=True, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
    assert texts[0] == "one "
    assert "".join(texts) == "one abc"


async def test_completions_have_sixteen_tokens_and_a_seed_by_default(gateway: Address, engine: SyntheticEngine) -> None:
    async with client(gateway) as api:
        answer = await api.completions.create(model=MODEL, prompt=[20, 21, 22])
    [spec] = engine.claimed
    assert spec.sampling.HasField("seed")
    assert list(spec.prompts[0].ids) == [20, 21, 22]
    assert answer.choices[0].text == answer_text(spec, 0)
    assert len(answer.choices[0].text) == 16


async def test_chat_fills_the_context_by_default(gateway: Address, engine: SyntheticEngine) -> None:
    async with client(gateway) as api:
        await api.chat.completions.create(model=MODEL, messages=MESSAGES)
    [spec] = engine.claimed
    assert len(spec.prompts[0].ids) + spec.sampling.max_tokens == 128


async def test_stop_names_what_stopped(gateway: Address) -> None:
    async with client(gateway) as api:
        answer = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, stop=["END"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra == {"stop_reason": "END"}


async def test_an_answer_that_failed_is_an_error(gateway: Address) -> None:
    async with client(gateway) as api:
        with pytest.raises(openai.InternalServerError, match="told to fail"):
            await api.completions.create(model=MODEL, prompt=[7])
        stream = await api.completions.create(model=MODEL, prompt=[7], stream=True)
        with pytest.raises(openai.APIError, match="told to fail"):
            async for _ in stream:
                pass


async def test_conversations_go_on_with_the_clients_own_messages(gateway: Address) -> None:
    async with client(gateway) as api:
        first = await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
        said = first.choices[0].message.model_dump()
        more = [*MESSAGES, said, {"role": "user", "content": [{"type": "text", "text": "and?"}]}]
        second = await api.chat.completions.create(model=MODEL, messages=more, max_tokens=4)
    assert second.choices[0].message.content
