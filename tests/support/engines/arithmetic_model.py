"""A model without weights that computes the next token from what it reads through the block tables.

Its "keys and values" are the tokens themselves, kept by slot, for each KV group that it has. A wrong block table, a
block that was freed too early, a cached prefix with other content, or a token computed twice raises a SlotError. It
stands in for the models in tests of scheduler, cache and worker: no torch, and `undisturbed` computes what any request
must get.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
from pagestream_engine import Engine, EngineConfig, SamplingParams
from pagestream_engine.features.beams import BeamSearch
from pagestream_engine.plan import HostMemory, KVSpec, PendingResult, StepLogprobs, StepPlan, StepResult, make_layout
from pagestream_engine.request import LogprobRow
from support.engines.tokenizers import byte_level
from tokenizers import Tokenizer

EOS = 0
BLOCK_SIZE = 16
"""Where the options name none."""
_MODULUS = 1_000_003
HOST_PAGE_BYTES = 2**20
"""Of a block: a GiB has 1,024 pages."""
LAYERS: dict[str, tuple[KVSpec, ...]] = {
    "full": (KVSpec(1, 1),),
    "full and full with larger blocks": (KVSpec(2, 1), KVSpec(1, 1)),
    "window": (KVSpec(1, 1, window=5),),
    "full and window": (KVSpec(1, 1), KVSpec(1, 1, window=6)),
    "window of one token": (KVSpec(1, 1), KVSpec(1, 1, window=1)),
    "two windows": (KVSpec(1, 1, window=3), KVSpec(1, 1, window=11)),
    "full with larger blocks": (KVSpec(1, 1), KVSpec(2, 1, window=7)),
    "window with larger blocks": (KVSpec(2, 2), KVSpec(1, 2, window=4), KVSpec(1, 1, window=9)),
}
"""Layers of small models whose KV groups differ, by what is particular about them. Windows are short as prompts."""


class SlotError(AssertionError):
    """A step contradicts the engine's tables or limits."""


@dataclass(frozen=True)
class ArithmeticFacts:
    vocab_size: int = 47
    max_position_embeddings: int = 4096
    eos_token_ids: tuple[int, ...] = (EOS,)
    kv_specs: tuple[KVSpec, ...] = (KVSpec(1, 1),)
    """Of each layer."""
    separates_outputs: bool = False
    """As a runner's whose prefill has other bits than its decode."""


@dataclass
class Row:
    """A sequence of the persistent batch."""

    token_ids: list[int]
    num_computed_tokens: int
    params: SamplingParams
    seed: int
    block_tables: list[list[int]]


@dataclass
class Page:
    """What a KV group keeps in a block: the tokens from one place of a sequence's table."""

    group: int = -1
    place: int = -1
    token_ids: list[int | None] = field(default_factory=list)


class ArithmeticRunner:
    """Executes plans over a cache of tokens, and checks every plan that it is given."""

    def __init__(self, config: EngineConfig, facts: ArithmeticFacts) -> None:
        self.model_info = facts
        self.num_steps = 0
        self.rows: dict[int, Row] = {}
        self._config = config
        block_size = config.cache.block_size or BLOCK_SIZE
        layout = make_layout(facts.kv_specs, block_size, facts.max_position_embeddings)
        self.kv_layout = replace(layout, separates_outputs=facts.separates_outputs)
        self._pages: list[Page] = []
        self._host_pages: list[Page] = []

    @classmethod
    def engine(cls, model: str | Path, config: EngineConfig) -> Engine:
        """Make an engine with such a runner, as a worker's process is told to."""
        return Engine(model, config, make_runner=cls._made)

    @classmethod
    def _made(cls, _: Path, config: EngineConfig) -> Self:
        return cls(config, ArithmeticFacts())

    @property
    def fingerprint(self) -> str:
        return f"{self.model_info.vocab_size:016x}"

    def profile_num_blocks(self) -> int:
        return 64

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._pages = [Page() for _ in range(num_blocks)]

    def allocate_host_pages(self) -> HostMemory:
        num_bytes = int(self._config.cache.swap_space * 2**30)
        self._host_pages = [Page() for _ in range(num_bytes // HOST_PAGE_BYTES)]
        return HostMemory(len(self._host_pages), HOST_PAGE_BYTES, load_page_s=0.0)

    def execute(self, plan: StepPlan) -> PendingResult:
        self.num_steps += 1
        self.edit(plan)
        self._check_limits(plan)
        self._copy(plan)
        result = self.compute(plan)
        self._swap(plan)
        return lambda: result

    def compute(self, plan: StepPlan) -> StepResult:
        """Write and read the slots of a plan's tokens, and sample."""
        scheduled = [
            (self.rows[row], count) for row, count in zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), strict=True)
        ]
        for row, count in scheduled:
            self._write(row, count)
        tokens = [self._read(row, count) for row, count in scheduled]
        for row, count in scheduled:
            row.num_computed_tokens += count
        sampled = []
        for number, source in zip(plan.sampled_rows.tolist(), plan.sampled_from.tolist(), strict=True):
            row = self.rows[number]
            _require(tokens[source] == row.token_ids, "a row samples from other tokens than its own")
            sampled.append(self.choose(row, tokens[source]))
        logprobs = self.logprobs(plan, sampled)
        for number, token_id in zip(plan.sampled_rows.tolist(), sampled, strict=True):
            self.rows[number].token_ids.append(token_id)
        return replace(as_result(plan, sampled), logprobs=logprobs)

    def logprobs(self, plan: StepPlan, sampled: Sequence[int | None]) -> StepLogprobs | None:
        """Return the likeliest next tokens of the rows that asked for them, before they get a token; None: the
        likeliest is sampled."""
        asked = [
            (place, count, self.rows[number].token_ids)
            for place, number in enumerate(plan.sampled_rows.tolist())
            if (count := self.rows[number].params.logprobs) is not None
        ]
        if not asked:
            return None
        most = max(count for _, count, _ in asked)
        vocab_size = self.model_info.vocab_size
        rows = [likeliest(token_ids, vocab_size, most, sampled[place]) for place, _, token_ids in asked]
        return StepLogprobs(
            samples=np.array([place for place, _, _ in asked], np.int32),
            counts=np.array([count for _, count, _ in asked], np.int32),
            token_ids=np.array([row.token_ids for row in rows], np.int32),
            logprobs=np.array([row.logprobs for row in rows], np.float32),
            ranks=np.ones(len(rows), np.int32),
        )

    def choose(self, row: Row, read: list[int]) -> int:
        """Return the next token of a row, from the tokens that were read back."""
        return next_token(read, self.model_info.vocab_size)

    def edit(self, plan: StepPlan) -> None:
        """Edit the rows as a plan says."""
        if plan.reset:
            self.rows.clear()
        for row in plan.removed.tolist():
            del self.rows[row]
        for new in plan.added:
            _require(new.row not in self.rows, f"row {new.row} is added twice")
            _require(0 <= new.row < self._config.scheduler.max_num_seqs, f"there is no row {new.row}")
            tables = [table.tolist() for table in new.block_tables]
            self.rows[new.row] = Row(new.token_ids.tolist(), new.num_computed_tokens, new.params, new.seed, tables)
        for group, edits in enumerate(plan.appended):
            for number, place, block in np.transpose((edits.rows, edits.places, edits.blocks)).tolist():
                table = self.rows[number].block_tables[group]
                _require(place >= len(table), "a block is not appended at the end of its table")
                table += [0] * (place - len(table)) + [block]

    def _copy(self, plan: StepPlan) -> None:
        copies = plan.copies.tolist()
        targets = [target for _, target in copies]
        _require(len(set(targets)) == len(targets), "a block is copied to twice")
        _require(not set(targets) & {source for source, _ in copies}, "a block is copied from and to")
        for source, target in copies:
            self._pages[target] = _copy_of(self._pages[source])

    def _swap(self, plan: StepPlan) -> None:
        """Copy as late as is allowed, so that a step which reads or writes what is copied beside it is noticed."""
        for block, page in plan.saves.tolist():
            self._host_pages[page] = _copy_of(self._pages[block])
        for block, page in plan.loads.tolist():
            self._pages[block] = _copy_of(self._host_pages[page])

    def _check_limits(self, plan: StepPlan) -> None:
        limits, rows = self._config.scheduler, plan.rows.tolist()
        least = 0 if len(plan.loads) else 1
        _require(least <= plan.num_tokens <= limits.max_num_batched_tokens, f"{plan.num_tokens} tokens in a step")
        _require(len(self.rows) <= limits.max_num_seqs, f"{len(self.rows)} rows")
        _require(len(set(rows)) == len(rows), "a row twice in a step")
        samples = set(plan.sampled_from.tolist())
        for index, (number, count) in enumerate(zip(rows, plan.num_new_tokens.tolist(), strict=True)):
            row = self.rows[number]
            end = row.num_computed_tokens + count
            _require(count > 0, "an empty chunk")
            _require(index < plan.num_prefills or count == 1, "a decode of several tokens")
            _require(end <= len(row.token_ids), "a chunk past the end")
            _require((index in samples) == (end == len(row.token_ids)), "a chunk samples before its end, or not at it")

    def _write(self, row: Row, count: int) -> None:
        for group, (spec, table) in enumerate(zip(self.kv_layout.groups, row.block_tables, strict=True)):
            for position in range(row.num_computed_tokens, row.num_computed_tokens + count):
                place, offset = divmod(position, spec.block_size)
                page = self._pages[table[place]]
                if (page.group, page.place) != (group, place):
                    page = self._pages[table[place]] = Page(group, place, [None] * spec.block_size)
                page.token_ids[offset] = row.token_ids[position]

    def _read(self, row: Row, count: int) -> list[int]:
        """Return a row's tokens up to the end of its chunk, after each group has read what its attention reads."""
        end = row.num_computed_tokens + count
        for group, (spec, table) in enumerate(zip(self.kv_layout.groups, row.block_tables, strict=True)):
            size, window = spec.block_size, spec.spec.window
            start = 0 if window is None else max(0, row.num_computed_tokens - window + 1)
            for place in range(start // size, -(-end // size)):
                page = self._pages[table[place]]
                first, last = max(start, place * size), min(end, (place + 1) * size)
                found = page.token_ids[first - place * size : last - place * size]
                if (page.group, page.place) != (group, place) or found != row.token_ids[first:last]:
                    raise SlotError(f"{row} reads other tokens than its own")
        return row.token_ids[:end]


class SeededRunner(ArithmeticRunner):
    """Its tokens depend on the sequence's seed too, unless the sequence is greedy. A step can be made to fail."""

    fails: str | None = None
    """Of the next step: "before" anything is done, or "after" everything was written."""

    def choose(self, row: Row, read: list[int]) -> int:
        return next_token(read, self.model_info.vocab_size, seed=0 if row.params.is_greedy else row.seed)

    def execute(self, plan: StepPlan) -> PendingResult:
        fails, self.fails = self.fails, None
        if fails == "before":
            raise MemoryError("no room for activations")
        given = super().execute(plan)
        if fails == "after":
            raise MemoryError("no room for logits")
        return given


def _copy_of(page: Page) -> Page:
    return replace(page, token_ids=list(page.token_ids))


def as_result(plan: StepPlan, token_ids: Sequence[int]) -> StepResult:
    """Return the result of a plan with one token for each sample."""
    tokens = np.array(token_ids, np.int32).reshape(-1, 1)
    return StepResult(plan.step_id, tokens, np.ones(len(tokens), np.int32))


def next_token(token_ids: Sequence[int], vocab_size: int, *, seed: int = 0) -> int:
    """Return the next token: a function of every token and its position."""
    state = (7 + seed) % _MODULUS
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % _MODULUS
    return state % vocab_size


def likeliest(token_ids: Sequence[int], vocab_size: int, count: int, sampled: int | None = None) -> LogprobRow:
    """Return the sampled token, or the likeliest, then the likeliest ones: a function of every token and its place."""
    state = next_token(token_ids, _MODULUS)
    logits = np.array([(state * (3 * token_id + 7) + token_id) % 1009 / 250 for token_id in range(vocab_size)])
    logprobs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    order = np.argsort(-logprobs, kind="stable")
    order = np.concatenate((order[:1] if sampled is None else [sampled], order[:count]))
    return LogprobRow(order.tolist(), logprobs[order].tolist(), 1)


def cumulative_logprob(prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> float:
    """Return the sum of the log probabilities of an output's tokens."""
    tokens = [*prompt, *output]
    places = range(len(prompt), len(tokens))
    return sum(likeliest(tokens[:place], vocab_size, 0, tokens[place]).logprobs[0] for place in places)


def searched(
    prompt: Sequence[int], params: SamplingParams, facts: ArithmeticFacts, max_model_len: int
) -> list[list[int]]:
    """Return the outputs of a beam search, the best first, from the whole tokens of each beam in each step."""
    ends = frozenset(params.stop_token_ids or ()) | frozenset(() if params.ignore_eos else facts.eos_token_ids)
    most = max_model_len - len(prompt) if params.max_tokens is None else params.max_tokens
    search = BeamSearch(params, ends, min(most, max_model_len - len(prompt)))
    beams = [list(prompt)]
    while steps := search.advance([likeliest(beam, facts.vocab_size, search.num_candidates) for beam in beams]):
        beams = [[*beams[step.parent], step.token_id] for step in steps]
    return [[beam.token_id for beam in hypothesis.beam.path()] for hypothesis in search.hypotheses]


def undisturbed(
    prompt: Sequence[int], params: SamplingParams, facts: ArithmeticFacts, max_model_len: int, *, seed: int = 0
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
    return byte_level(["</s>"])


def _require(holds: bool, contradiction: str) -> None:
    if not holds:
        raise SlotError(contradiction)
