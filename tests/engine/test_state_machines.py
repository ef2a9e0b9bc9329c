"""Random groups of siblings in tiny pools: forks, copies, preemptions, failed steps, aborts and resumes in any order.

The policy, the layers and their windows, a host tier, drafts and two steps in flight are drawn together. The
bookkeeping holds after every step, no sequence writes a block that another reads, every sibling ends, and gets the
tokens that it gets alone. `make properties` draws many more examples.
"""

import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pagestream_engine import (
    Choice,
    Engine,
    EngineConfig,
    InvalidRequest,
    Request,
    SamplingParams,
    SequenceOutput,
    register_policy,
)
from pagestream_engine.kv_cache import CACHED, FREE, HELD
from pagestream_engine.sampling_params import child_seed
from pagestream_engine.scheduler import RoundRobin
from support.engines.arithmetic_model import (
    HOST_PAGE_BYTES,
    LAYERS,
    ArithmeticFacts,
    SeededRunner,
    cumulative_logprob,
    make_folder,
    searched,
    undisturbed,
)
from support.engines.speculating_model import SpeculatingRunner

FACTS = ArithmeticFacts(vocab_size=23)
SHORT_TURNS = "short_turns"
POLICIES = ("fcfs", "priority", "shortest_first", "round_robin", "fair", SHORT_TURNS)
PREFIXES = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9], [3])


register_policy(SHORT_TURNS, lambda: RoundRobin(slice_tokens=3))


def check_block_map(engine: Engine) -> None:
    """Compare the map of a small pool, which has a cell for each block, with the statistics and with itself."""
    found, stats = engine.block_map(), engine.stats()
    assert (found.num_running, found.num_waiting) == (stats.num_running, stats.num_waiting)
    assert len(found.cells) == found.num_blocks == stats.num_blocks
    assert len({seq.seq_id for seq in found.sequences}) == len(found.sequences) == found.num_running
    counts = Counter(min(cell, HELD) for cell in found.cells)
    assert counts[FREE] + counts[CACHED] == found.num_free == stats.num_free_blocks
    assert counts[CACHED] == found.num_cached == stats.num_cached_blocks
    shown: Counter[int] = Counter()
    for cell in found.cells:
        if cell >= HELD:
            holders = found.holders[cell - HELD]
            assert holders.num_references >= len(set(holders.sequences)) == len(holders.sequences)
            shown.update(holders.sequences)
    assert [seq.num_blocks for seq in found.sequences] == [shown[place] for place in range(len(found.sequences))]


class GroupMachine(RuleBasedStateMachine):
    engine: Engine
    runner: SeededRunner

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.groups: dict[int, tuple[list[int], SamplingParams, int]] = {}
        self.expected: dict[str, list[int]] = {}
        self.seen: dict[str, list[int]] = {}

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.run_to_the_end()
        self.folder.cleanup()

    @initialize(
        layers=st.sampled_from(sorted(LAYERS)),
        block_size=st.sampled_from([1, 2, 4, 8]),
        num_tokens=st.integers(24, 96),
        max_num_seqs=st.integers(1, 8),
        spare_budget=st.integers(0, 12),
        caching=st.booleans(),
        num_host_pages=st.sampled_from([0, 0, 3, 40]),
        ahead=st.booleans(),
        num_drafts=st.integers(0, 2),
        counts_seed=st.integers(0, 99),
        policy=st.sampled_from(POLICIES),
        separates_outputs=st.booleans(),
    )
    def start(
        self,
        *,
        layers: str,
        block_size: int,
        num_tokens: int,
        max_num_seqs: int,
        spare_budget: int,
        caching: bool,
        num_host_pages: int,
        ahead: bool,
        num_drafts: int,
        counts_seed: int,
        policy: str,
        separates_outputs: bool,
    ) -> None:
        caching = caching or num_host_pages > 0  # half of the runs have a tier, so that it meets everything else
        self.is_caching, self.block_size = caching, block_size
        self.finds_whole_prompts = caching and layers == "full" and num_tokens // block_size * block_size > 22
        self.facts = replace(FACTS, kv_specs=LAYERS[layers], separates_outputs=separates_outputs)
        config = EngineConfig.from_options(
            {
                "block_size": block_size,
                "num_gpu_blocks_override": num_tokens // block_size * len(LAYERS[layers]),
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_seqs + spare_budget,
                "enable_prefix_caching": caching,
                "async_scheduling": ahead,
                "swap_space": num_host_pages * HOST_PAGE_BYTES / 2**30,
                "scheduling_policy": policy,
            }
        )

        def make_runner(_: Path, config: EngineConfig) -> SeededRunner:
            if num_drafts:
                self.runner = SpeculatingRunner(config, self.facts, num_drafts, Random(counts_seed))
            else:
                self.runner = SeededRunner(config, self.facts)
            return self.runner

        self.engine = Engine(make_folder(Path(self.folder.name)), config, make_runner=make_runner)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(0, 22), max_size=6),
        n=st.sampled_from([1, 1, 2, 3, 5]),
        temperature=st.sampled_from([0.0, 1.0]),
        max_tokens=st.integers(1, 24),
        ignore_eos=st.booleans(),
        num_losers=st.sampled_from([0, 2]),
    )
    def add(self, prefix: list[int], tail: list[int], n: int, num_losers: int, **given: float) -> None:
        number, prompt = len(self.groups), [*prefix, *tail]
        if isinstance(self.runner, SpeculatingRunner):
            num_losers = 0  # it has no log probabilities of drafts
        params = SamplingParams(n=n, best_of=n + num_losers, seed=number, **given)  # type: ignore[arg-type]
        self.groups[number] = (prompt, params, n)
        outputs = []
        for child in range(n + num_losers):
            seed = 0 if params.is_greedy else child_seed(number, child)
            outputs.append(undisturbed(prompt, params, FACTS, self.engine.max_model_len, seed=seed))
        if num_losers:
            outputs.sort(key=lambda output: -cumulative_logprob(prompt, output, FACTS.vocab_size))
        for child, output in enumerate(outputs[:n]):
            self.expected[f"{number}/{child}"] = output
            self.seen[f"{number}/{child}"] = []
        self.submit(number)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(0, 22), max_size=6),
        width=st.integers(1, 4),
        n=st.integers(1, 2),
        max_tokens=st.integers(1, 12),
        min_tokens=st.integers(0, 2),
        early_stopping=st.sampled_from([True, False, "never"]),
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
    )
    def add_search(self, prefix: list[int], tail: list[int], width: int, n: int, **given: Any) -> None:
        number, prompt = len(self.groups), [*prefix, *tail]
        given["min_tokens"] = min(given["min_tokens"], given["max_tokens"])
        params = SamplingParams(n=n, beam_width=max(n, width), use_beam_search=True, seed=number, **given)
        self.groups[number] = (prompt, params, n)
        best = searched(prompt, params, FACTS, self.engine.max_model_len)
        names = [f"{number}/{child}" for child in range(n)]
        self.expected.update(zip(names, best, strict=False))
        self.seen.update({name: [] for name in names})
        try:
            self.submit(number)
        except InvalidRequest:  # the pool can't hold all beams, or there are not as many seats
            assert params.width > 1, "a search of one beam is a sequence like others"
            for name in names:
                del self.expected[name]

    def submit(self, number: int) -> None:
        """Adds the siblings that have not ended, with what was seen of them."""
        prompt, params, n = self.groups[number]
        siblings = [
            Choice(f"{number}/{child}", params.for_child(number, child), self.seen[f"{number}/{child}"], child)
            for child in range(n)
            if f"{number}/{child}" in self.expected
        ]
        self.engine.add(Request(prompt, siblings, priority=number % 3, tenant="ab"[number % 2]))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort_one(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.engine.abort_request(name)
        del self.expected[name]

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), lose=st.integers(0, 3))
    def resume_all(self, data: st.DataObject, lose: int) -> None:
        """As after an engine's death: the siblings come again together, with what the log has of each."""
        number = int(data.draw(st.sampled_from(sorted(self.expected))).split("/")[0])
        names = [name for name in self.expected if name.split("/")[0] == str(number)]
        for index, name in enumerate(names):
            self.engine.abort_request(name)
            if index < lose:  # An append may hold only some of a step's tokens.
                self.seen[name] = self.seen[name][:-1]
        self.submit(number)

    @precondition(lambda self: self.expected)
    @rule(when=st.sampled_from(["before", "after"]))
    def fail(self, when: str) -> None:
        """A step that fails has done nothing that counts, and neither has one that was scheduled while it ran."""
        self.runner.fails = when
        with suppress(MemoryError):
            while self.expected:
                self.take(self.engine.step())
        self.runner.fails = None

    @rule(max_num_seqs=st.integers(1, 8), saves_blocks=st.booleans())
    def limit(self, *, max_num_seqs: int, saves_blocks: bool) -> None:
        """As an engine that gives up seats and saves for want of memory, and takes them back."""
        self.engine.set_limits(max_num_seqs, saves_blocks=saves_blocks)

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.take(self.engine.step())
            self.engine.check_invariants()

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            assert output.seq_id in self.expected, "an output of a sequence that is gone"
            assert output.token_id is not None
            seen = self.seen[output.seq_id]
            self.check_hit(output, len(seen))
            seen.append(output.token_id)
            assert seen == self.expected[output.seq_id][: len(seen)]
            if output.finish_reason is not None:
                assert seen == self.expected.pop(output.seq_id)

    def check_hit(self, output: SequenceOutput, num_seen: int) -> None:
        """A hit is of whole blocks, at least one token is computed, and without caching there is none."""
        prompt, _, _ = self.groups[int(output.seq_id.split("/")[0])]
        most = min(len(prompt), len(prompt) + num_seen - 1) if self.is_caching else 0
        assert 0 <= output.num_cached_tokens <= most, output

    @invariant()
    def the_bookkeeping_holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_invariants()
            check_block_map(self.engine)
            assert self.engine.has_unfinished_requests() == bool(self.expected)

    def run_to_the_end(self) -> None:
        limit = 20 + sum(n * (len(prompt) + 24 * 40) for prompt, _, n in self.groups.values())
        while self.expected and limit > 0:
            self.step(times=1)
            limit -= 1
        assert not self.expected, "some sibling never ends"
        assert self.engine.stats().num_free_blocks == self.engine.stats().num_blocks
        self.check_that_nothing_is_lost()

    def check_that_nothing_is_lost(self) -> None:
        """One sequence can have the whole pool, and one after it finds what it has left there."""
        assert self.engine.fragmentation() == 0.0
        assert not self.engine.block_map().holders
        if self.finds_whole_prompts:
            prompt = [*range(21)]
            for number in ("before", "after"):
                self.engine.add_request(number, prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
                found = [output.num_cached_tokens for _ in range(60) for output in self.engine.step()]
                assert number == "before" or found == [(len(prompt) - 1) // self.block_size * self.block_size]
            assert self.engine.stats().num_free_blocks == self.engine.stats().num_blocks


GroupMachine.TestCase.settings = settings(max_examples=settings().max_examples // 3, stateful_step_count=30)
TestGroupMachine = GroupMachine.TestCase
