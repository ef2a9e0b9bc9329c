"""Greedy tokens equal those of `transformers` in float32, whatever the scheduler does to the batch.

Where the reference's best two logits are closer than `TIE`, the second is accepted, too, counted and printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from pagestream_engine import LLM, SamplingParams
from pagestream_engine.attention import AttentionSpec
from pagestream_engine.models.select import open_model
from pagestream_engine.models.source import Target
from pagestream_engine.request.outputs import RequestOutput
from pagestream_engine.runner.backends import kv_layout
from support.engines.tiny_models import make_model, random_prompts, reference_model

NUM_TOKENS = 48
TIE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = [1, 5, 16, 17, 33, 64, 100]
SHARED_PREFIX = 40
WINDOWED = ["qwen2-window", "qwen3-window", "mistral", "mixtral", "qwen3-moe", "gemma2", "gemma3", "phi3"]
MODELS = ["llama", *WINDOWED, "demo"]
DEMO = Path(__file__).parents[3] / "deploy" / "demo-model" / "model"
NUM_DEMO_QUESTIONS = 6


@dataclass
class Reference:
    """A model of `transformers`, which says of each token whether it would have chosen it."""

    folder: Path
    prompts: list[list[int]]
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def logits(self, prompt: list[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Return what each token is chosen from, (tokens, vocab_size), in one pass over prompt and tokens."""
        given = (*prompt, *token_ids)
        if given not in self.known:
            with torch.inference_mode():
                logits = self._model(torch.tensor([given[:-1]]), use_cache=False).logits[0]
            self.known[given] = logits[len(prompt) - 1 :].float()
        return self.known[given]

    @cached_property
    def _model(self) -> Any:
        return reference_model(self.folder)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            made[name] = make_reference(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


def make_reference(name: str, scratch: Path) -> Reference:
    if name == "demo":
        return Reference(DEMO, demo_prompts())
    return Reference(make_model(scratch / "model", name), mixed_prompts())


def mixed_prompts() -> list[list[int]]:
    """Mixed lengths, and some prompts that share a beginning."""
    prompts = random_prompts(LENGTHS)
    prefix, *tails = random_prompts([SHARED_PREFIX, 3, 30], seed=1)
    return [*prompts, *(prefix + tail for tail in tails), prompts[-1]]


def demo_prompts() -> list[list[int]]:
    """Questions of the demo model's own world, as its chat template puts them."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    questions = json.loads((DEMO / "questions.json").read_text())["held_out"]
    chosen = questions[:: len(questions) // NUM_DEMO_QUESTIONS][:NUM_DEMO_QUESTIONS]
    conversation = [m for q in chosen for m in (*q["messages"], {"role": "assistant", "content": q["answer"]})]
    texts = [
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        for messages in (*(question["messages"] for question in chosen), conversation + chosen[0]["messages"])
    ]
    texts.append("Once upon a time")
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def attention_specs(reference: Reference, max_model_len: int) -> Sequence[AttentionSpec]:
    with torch.inference_mode():
        return open_model(reference.folder).attention_specs(Target(torch.float32, torch.device("cpu"), max_model_len))


def generate(reference: Reference, **options: Any) -> tuple[LLM, list[RequestOutput]]:
    llm = LLM(reference.folder, dtype="float32", device="cpu", **options)
    outputs = llm.generate(reference.prompts, GREEDY)
    llm.engine.check_invariants()
    assert llm.engine.stats().num_free_blocks == llm.engine.stats().num_blocks
    return llm, outputs


def check_parity(reference: Reference, outputs: list[RequestOutput]) -> None:
    """Each token is the reference's own choice after the tokens before it, so that all are what it would generate."""
    num_ties = 0
    for index, (prompt, output) in enumerate(zip(reference.prompts, outputs, strict=True)):
        token_ids = output.outputs[0].token_ids
        assert len(token_ids) == NUM_TOKENS
        logits = reference.logits(prompt, token_ids)
        gaps = logits.max(dim=-1).values - logits[range(NUM_TOKENS), token_ids]
        worst = int(gaps.argmax())
        assert gaps[worst] <= TIE, f"prompt {index}, token {worst}: the reference prefers its own by {gaps[worst]}"
        num_ties += int((gaps > 0).sum())
    print(f"{num_ties} ties in {len(outputs)} sequences")


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_is_longer_than_the_window(name: str, reference_of: Callable[[str], Reference]) -> None:
    reference = reference_of(name)
    windows = [spec.window for spec in attention_specs(reference, 512)]
    longest = max(map(len, reference.prompts))
    assert any(window is not None and window < longest for window in windows) == (name in WINDOWED)


@pytest.mark.parametrize(("name", "caching"), [("llama", False), *((name, True) for name in MODELS)])
def test_one_batch_of_mixed_lengths(name: str, caching: bool, reference_of: Callable[[str], Reference]) -> None:
    reference = reference_of(name)
    block_size = 8
    llm, outputs = generate(
        reference, enable_prefix_caching=caching, num_gpu_blocks_override=512, block_size=block_size
    )
    check_parity(reference, outputs)
    again = llm.generate(reference.prompts, GREEDY)
    check_parity(reference, again)
    hits = [output.num_cached_tokens for output in again]
    assert hits == [(len(p) - 1) // block_size * block_size if caching else 0 for p in reference.prompts]


@pytest.mark.parametrize(("name", "caching"), [("llama", False), *((name, True) for name in MODELS)])
def test_a_pool_so_small_that_it_preempts(name: str, caching: bool, reference_of: Callable[[str], Reference]) -> None:
    reference = reference_of(name)
    longest = max(map(len, reference.prompts)) + NUM_TOKENS
    blocks = kv_layout(attention_specs(reference, longest), 8, longest).num_blocks_for(longest) + 2
    llm, outputs = generate(
        reference, enable_prefix_caching=caching, num_gpu_blocks_override=blocks, block_size=8, max_model_len=longest
    )
    check_parity(reference, outputs)
    assert llm.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("name", MODELS)
def test_prompts_longer_than_the_budget_of_a_step(name: str, reference_of: Callable[[str], Reference]) -> None:
    reference = reference_of(name)
    budget = 7
    assert max(map(len, reference.prompts)) > budget
    llm, outputs = generate(
        reference,
        max_num_batched_tokens=budget,
        max_num_seqs=5,
        num_gpu_blocks_override=256,
        enable_prefix_caching=False,
    )
    check_parity(reference, outputs)
    stats = llm.engine.stats()
    assert stats.num_steps >= (stats.num_prompt_tokens + stats.num_generated_tokens - len(outputs)) / budget


def test_the_demo_model_ends_where_the_reference_has_its_end_token(reference_of: Callable[[str], Reference]) -> None:
    reference = reference_of("demo")
    llm = LLM(reference.folder, dtype="float32", device="cpu", num_gpu_blocks_override=256)
    (eos,) = llm.engine.eos_token_ids
    greedy = llm.generate(reference.prompts, GREEDY)
    check_parity(reference, greedy)
    outputs = llm.generate(reference.prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    num_stopped = 0
    for output, whole in zip(outputs, greedy, strict=True):
        (choice,), wanted = output.outputs, whole.outputs[0].token_ids
        ends = eos in wanted
        num_stopped += ends
        assert choice.finish_reason == ("stop" if ends else "length")
        assert choice.token_ids == (wanted[: wanted.index(eos) + 1] if ends else wanted)
        assert choice.text == tokenizer.decode(choice.token_ids)
    assert num_stopped >= NUM_DEMO_QUESTIONS


def test_seeded_tokens_do_not_depend_on_the_batch(reference_of: Callable[[str], Reference]) -> None:
    reference = reference_of("llama")
    params = [
        SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=index, max_tokens=24, ignore_eos=True)
        for index in range(len(reference.prompts))
    ]
    roomy = LLM(reference.folder, dtype="float32", device="cpu", num_gpu_blocks_override=256)
    alone = [roomy.generate([p], one)[0].outputs[0].token_ids for p, one in zip(reference.prompts, params, strict=True)]
    tight = LLM(
        reference.folder,
        dtype="float32",
        device="cpu",
        num_gpu_blocks_override=18,
        block_size=8,
        max_num_batched_tokens=33,
    )
    together = [output.outputs[0].token_ids for output in tight.generate(reference.prompts, params)]
    assert tight.engine.stats().num_preemptions > 0
    assert together == alone
    assert len({tuple(token_ids) for token_ids in together}) == len(together)
