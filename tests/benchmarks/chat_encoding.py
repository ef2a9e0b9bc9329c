"""What 1,000 chats with one system prompt cost a gateway before they are accepted: rendering and encoding.

    PYTHONPATH=tests python tests/benchmarks/chat_encoding.py [--chats 1000] [--system-chars 8000] [--rounds 5]

All chats come at once, as drafts of the demo model with a template of marks around messages. "alone": each draft is a
task of the threads, without a cache. "batches": the gateway's pool, which starts with an empty cache in each round.
Wall time and processor time of the process, in turns; the median of the rounds, and the longest time for which the
event loop did not run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import AnswerForm, ModelCard, RequestSpec
from pagestream_gateway.encoder import EncoderPool, TokenizePool
from pagestream_gateway.models import LoadedModel, load_model
from pagestream_gateway.preparation import prepare, preparing
from pagestream_gateway.request import ChatPrompt, Draft
from pagestream_gateway.settings import LimitSettings
from support.processes.stack import DEMO_MODEL
from tokenizers import Tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
SENTENCE = "The miller of the village answers each question of his customers with patience, and never twice. "
Prepare = Callable[[Draft], Awaitable[RequestSpec]]


def demo_model() -> LoadedModel:
    """Return the demo model's tokenizer with the marks of a chat."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return load_model(
        ModelCard(
            name="m",
            tokenizer_json_zlib=zlib.compress(tokenizer.to_str().encode()),
            chat_template=TEMPLATE,
            max_model_len=100_000,
            vocab_size=tokenizer.get_vocab_size(),
        )
    )


def chats(count: int, system_chars: int) -> list[Draft]:
    """Return chats of one system prompt, each with a question of its own."""
    system = {"role": "system", "content": (SENTENCE * (system_chars // len(SENTENCE) + 1))[:system_chars]}
    questions = [f"Question {number}: where does the river go that turns the mill?" for number in range(count)]
    prompts = [ChatPrompt([system, {"role": "user", "content": question}]) for question in questions]
    return [
        Draft(model="m", prompts=[prompt], prompt_field="messages", sampling=SamplingParams(), answer=AnswerForm())
        for prompt in prompts
    ]


async def measure(drafts: Sequence[Draft], prepare_one: Prepare) -> tuple[float, float, float]:
    """Return wall time, processor time and the longest pause of the event loop, in seconds."""
    pauses = [0.0]

    async def watch() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            pauses.append(time.perf_counter() - before - 0.001)

    watching = asyncio.create_task(watch())
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*map(prepare_one, drafts))
    figures = time.perf_counter() - wall, time.process_time() - cpu
    watching.cancel()
    return *figures, max(pauses)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=1000)
    parser.add_argument("--system-chars", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model, drafts = demo_model(), chats(options.chats, options.system_chars)
    limits = replace(LimitSettings(), tokenize_queue=options.chats)
    seen: dict[str, list[tuple[float, float, float]]] = {"alone": [], "batches": []}
    for _ in range(options.rounds):
        threads = TokenizePool(workers=limits.tokenize_workers, max_pending=options.chats, limit_s=600)
        async with threads:
            encoders = EncoderPool(threads, limits)

            async def alone(draft: Draft, pool: TokenizePool = threads) -> RequestSpec:
                return await pool.run(lambda: prepare(draft, model, limits))

            async def together(draft: Draft, pool: EncoderPool = encoders) -> RequestSpec:
                preparation = preparing(draft, model, limits, b"tenant")
                return await pool.prepare(preparation, model.encoder, cuts_long_texts=False)

            seen["alone"].append(await measure(drafts, alone))
            seen["batches"].append(await measure(drafts, together))
    for name, rounds in seen.items():
        wall, cpu, pause = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name}: {wall * 1e3:.0f} ms, {cpu * 1e3:.0f} ms of processor, longest pause {pause * 1e3:.0f} ms")
    cpus = [statistics.median(each[1] for each in rounds) for rounds in seen.values()]
    print(f"processor time: {cpus[0] / cpus[1]:.1f} times as much alone; {encoders.cache.num_bytes} bytes cached")


if __name__ == "__main__":
    asyncio.run(main())
