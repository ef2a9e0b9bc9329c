"""Compare the engine's greedy tokens and log probabilities with those of `transformers`, whatever the architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pagestream_engine import LLM, RequestOutput, SamplingParams
from support.engines.architectures import VOCAB_SIZE, WINDOW

NUM_TOKENS = 12
TIE = 1e-3
"""Where the reference's two best logits are closer, another token is accepted, and the sequence compared no further."""
TOLERANCE = 2e-3
"""Of log probabilities, in float32."""
_BUDGET = 16
"""Tokens a step: prompts are computed in chunks."""
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)


Reference = list[tuple[list[int], torch.Tensor]]
"""For each prompt tokens, and logits (tokens, vocab_size)."""


def check_parity(folder: Path, reference: Reference | None = None, *, copies: int = 1, **options: Any) -> LLM:
    """Run prompts of mixed lengths together, twice, and compare; a prompt is longer than any window.

    The longest are computed in chunks, and the second pass hits cached prefixes unless the pool is smaller.

    Args:
        folder: of the model.
        reference: of `references`; made where there is none.
        copies: of each prompt.
        options: of the engine.

    Returns:
        The engine that ran them.

    Raises:
        AssertionError: tokens or log probabilities differ, or no prompt was cut, or none was cached.
        EngineError: the engine refuses the model.
    """
    prompts = mixed_prompts() * copies
    llm = LLM(
        folder,
        **{
            "dtype": "float32",
            "device": "cpu",
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": 80,
            "max_num_batched_tokens": _BUDGET,
            "enable_prefix_caching": True,
            "max_logprobs": 5,
            **options,
        },
    )
    reference = (references(folder) if reference is None else reference) * copies
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        llm.engine.check_invariants()
        for index, (output, (tokens, logits)) in enumerate(zip(outputs, reference, strict=True)):
            compare(index, output, tokens, logits)
    stats = llm.engine.stats()
    computed = stats.num_prompt_tokens - sum(output.num_cached_tokens for output in outputs)
    assert max(map(len, prompts)) > _BUDGET
    assert stats.num_steps >= computed / _BUDGET, "prompts were not computed in chunks"
    if "num_gpu_blocks_override" not in options:  # a smaller pool may have evicted them
        assert outputs[-1].num_cached_tokens > 0, "the second pass found no cached prefix"
    return llm


def mixed_prompts() -> list[list[int]]:
    """Prompts below and above the window, two of which share a beginning."""
    generator = torch.Generator().manual_seed(5)
    first, second, third, tail = (
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (3, 2 * WINDOW + 5, 17, 6)
    )
    return [first, second, third, second[:24] + tail]


def references(folder: Path) -> Reference:
    """What `generate` gives for each of the prompts alone."""
    import transformers

    architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.use_mtp = None  # a published configuration may say that it has such layers
    found = []
    for prompt in mixed_prompts():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        found.append((out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).float()))
    return found


def compare(index: int, output: RequestOutput, tokens: list[int], logits: torch.Tensor) -> None:
    """Raise AssertionError where an output differs from the reference."""
    (choice,) = output.outputs
    assert choice.error is None, f"prompt {index}: {choice.error}"
    expected = logits.log_softmax(-1)
    assert choice.logprobs is not None
    for place, (got, wanted) in enumerate(zip(choice.token_ids, tokens, strict=True)):
        difference = abs(choice.logprobs[place][got].logprob - float(expected[place, got]))
        assert difference <= TOLERANCE, f"prompt {index}, token {place}: log probabilities differ by {difference:.2g}"
        if got != wanted:
            gap = float(logits[place].max() - logits[place, got])
            assert gap <= TIE, f"prompt {index}, token {place}: the reference prefers its own by {gap:.2g}"
            return
