"""Beam searches and `best_of` through queue, worker and log: nothing before the end, and the same from any engine."""

import asyncio
from pathlib import Path

import pytest
from pagestream.v1.inference_pb2 import EARLY_STOPPING_NEVER
from pagestream_engine import SamplingParams
from pagestream_streams import Broker, GatewaySession
from support.engines.arithmetic_model import SeededRunner, searched
from support.engines.arithmetic_worker import FACTS, SlowRunner, accepted, read, running_worker, tokens
from support.protocol.token_streams import eventually

pytestmark = pytest.mark.served


@pytest.mark.parametrize("core", [pytest.param("inline", marks=pytest.mark.slow), "process"])
async def test_a_search_begins_anew_on_the_next_engine(redis_url: str, tmp_path: Path, core: str) -> None:
    search = {"n": 2, "use_beam_search": True, "beam_width": 4, "length_penalty": 0.5, "max_tokens": 40}
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path / "first", SlowRunner) as first:
            spec = await accepted(gateway, [1, 2], **search, early_stopping=EARLY_STOPPING_NEVER, ignore_eos=False)
            reading = asyncio.create_task(read(gateway, spec))
            await eventually(lambda: first.worker.load()["running"] == 4)
            await first.end()
        assert (await broker.view(spec.request_id, "tenant")).next_index == 0, "a beam's tokens can still change"
        async with running_worker(broker, tmp_path / "second", engine_core=core) as second:
            log = await reading
            await eventually(lambda: second.worker.load()["running"] == 0)
            await second.end()
    best = searched([1, 2], SamplingParams(**search, early_stopping="never"), FACTS, 1000)  # type: ignore[arg-type]
    assert [tokens(log, choice) for choice in range(2)] == best[:2]
    assert log[-1].end.usage.completion_tokens == sum(map(len, best[:2]))


async def test_of_best_of_choices_the_likeliest_are_put_out(redis_url: str, tmp_path: Path) -> None:
    async with await Broker.connect(redis_url) as broker, GatewaySession(broker) as gateway:
        async with running_worker(broker, tmp_path, SeededRunner) as worker:
            wide = await read(gateway, await accepted(gateway, [3, 4], n=5, seed=9, logprobs=0))
            best = await read(gateway, await accepted(gateway, [3, 4], n=2, best_of=5, seed=9))
            await worker.end()
    scores = dict.fromkeys(range(5), 0.0)
    for entry in wide:
        if entry.WhichOneof("body") == "token_id":
            scores[entry.choice] += entry.logprobs.entries[0].logprob
    ranked = sorted(scores, key=lambda choice: -scores[choice])
    assert [tokens(best, choice) for choice in range(2)] == [tokens(wide, choice) for choice in ranked[:2]]
