"""A model without weights that computes the next token from what it reads through the block table.

Its "keys and values" are the tokens themselves, kept by slot. A wrong block table, a block that was freed too early, a
cached prefix with other content, or a token computed twice raises a SlotError or changes the output. It stands in for
the models in tests of scheduler, cache and worker: no torch, and `undisturbed` computes what any request must get.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from pathlib import Path

from pagestream_engine.config import EngineConfig
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import Sequence
from pagestream_engine.scheduler.base import SampledTokens, ScheduledSequence, ScheduledStep
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = 0
_EMPTY = -1
_MODULUS = 1_000_003


class SlotError(AssertionError):
    """A step contradicts the engine's tables or limits."""


@dataclass(frozen=True)
class ArithmeticFacts:
    vocab_size: int = 47
    max_position_embeddings: int = 4096
    eos_token_ids: tuple[int, ...] = (EOS,)


class ArithmeticRunner:
    """Executes steps over a cache of tokens, and checks every step that it is given."""

    def __init__(self, config: EngineConfig, facts: ArithmeticFacts) -> None:
        self.model_config = facts
        self.num_steps = 0
        self._config = config
        self._block_size = config.cache.block_size
        self._slots: list[int] = []

    @property
    def fingerprint(self) -> str:
        return f"{self.model_config.vocab_size:016x}"

    def profile_num_blocks(self) -> int:
        return 64

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._slots = [_EMPTY] * (num_blocks * self._block_size)

    def execute(self, step: ScheduledStep) -> SampledTokens:
        self.num_steps += 1
        scheduled = [*step.prefills, *step.decodes]
        self._check_limits(step, scheduled)
        self._copy(step)
        for item in scheduled:
            self._write(item)
        tokens = [self._read(item) for item in scheduled]
        return SampledTokens(
            [
                self.choose(seq, read)
                for item, read in zip(scheduled, tokens, strict=True)
                if item.needs_sample
                for seq in (item.seq, *item.siblings)
            ]
        )

    def choose(self, seq: Sequence, read: list[int]) -> int:
        """Return the next token of a sequence, from the tokens that were read back."""
        return next_token(read, self.model_config.vocab_size)

    def _copy(self, step: ScheduledStep) -> None:
        targets = [copy.target for copy in step.copies]
        _require(len(set(targets)) == len(targets), "a block is copied to twice")
        _require(not set(targets) & {copy.source for copy in step.copies}, "a block is copied from and to")
        size = self._block_size
        for source, target in step.copies:
            self._slots[target * size : (target + 1) * size] = self._slots[source * size : (source + 1) * size]

    def _check_limits(self, step: ScheduledStep, scheduled: list[ScheduledSequence]) -> None:
        limits = self._config.scheduler
        _require(0 < step.num_tokens <= limits.max_num_batched_tokens, f"{step.num_tokens} tokens in a step")
        num_seqs = len(scheduled) + sum(len(item.siblings) for item in scheduled)
        _require(num_seqs <= limits.max_num_seqs, f"{num_seqs} sequences in a step")
        _require(len({item.seq.seq_id for item in scheduled}) == len(scheduled), "a sequence twice in a step")
        for item in scheduled:
            end = item.seq.num_computed_tokens + item.num_new_tokens
            _require(item.num_new_tokens > 0, "an empty chunk")
            _require(end <= len(item.seq.token_ids), "a chunk past the end")
            _require(item.needs_sample or not item.siblings, "siblings without a sample")
            _require(item.needs_sample == (end == len(item.seq.token_ids)), "needs_sample is wrong")

    def _write(self, item: ScheduledSequence) -> None:
        seq = item.seq
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + item.num_new_tokens):
            self._slots[self._slot(seq.block_table, position)] = seq.token_ids[position]

    def _read(self, item: ScheduledSequence) -> list[int]:
        seq = item.seq
        end = seq.num_computed_tokens + item.num_new_tokens
        read = [self._slots[self._slot(seq.block_table, position)] for position in range(end)]
        _require(read == seq.token_ids[:end], f"{seq!r} reads other tokens than its own")
        return read

    def _slot(self, block_table: list[int], position: int) -> int:
        return block_table[position // self._block_size] * self._block_size + position % self._block_size


class SeededRunner(ArithmeticRunner):
    """Its tokens depend on the sequence's seed too, unless the sequence is greedy. A step can be made to fail."""

    fails: str | None = None
    """Of the next step: "before" anything is done, or "after" everything was written."""

    def choose(self, seq: Sequence, read: list[int]) -> int:
        return next_token(read, self.model_config.vocab_size, seed=0 if seq.params.is_greedy else seq.seed)

    def execute(self, step: ScheduledStep) -> SampledTokens:
        fails, self.fails = self.fails, None
        if fails == "before":
            raise MemoryError("no room for activations")
        given = super().execute(step)
        if fails == "after":
            raise MemoryError("no room for logits")
        return given


def next_token(token_ids: Tokens[int], vocab_size: int, *, seed: int = 0) -> int:
    """Return the next token: a function of every token and its position."""
    state = (7 + seed) % _MODULUS
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % _MODULUS
    return state % vocab_size


def undisturbed(
    prompt: Tokens[int], params: SamplingParams, facts: ArithmeticFacts, max_model_len: int, *, seed: int = 0
) -> list[int]:
    """Return the output of a request that runs alone, without stop strings; `seed` is for a `SeededRunner`."""
    tokens = list(prompt)
    ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(facts.eos_token_ids))
    while True:
        tokens.append(next_token(tokens, facts.vocab_size, seed=seed))
        num_output = len(tokens) - len(prompt)
        if tokens[-1] in ends and num_output >= params.min_tokens:
            break
        if len(tokens) >= max_model_len or num_output == params.max_tokens:
            break
    return tokens[len(prompt) :]


def make_folder(folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    """Write a model folder without weights, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "arithmetic"}))
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def byte_level_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte: 0 is `</s>`, 1 to 256 follow the order of GPT-2's alphabet."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(["</s>", *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def byte_fallback_tokenizer(words: Tokens[str] = ("▁", "a", "▁hi", "é", "語")) -> Tokenizer:
    """Return a tokenizer in Llama 2's form: words with ▁ for a space, and a token for each byte outside of words."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocab |= {word: 257 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _require(holds: bool, contradiction: str) -> None:
    if not holds:
        raise SlotError(contradiction)
