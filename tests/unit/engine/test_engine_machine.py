"""Random adds, aborts, resumes and steps in tiny pools, with none to three tokens a sample: the bookkeeping holds after
every step, and every request gets the tokens of an undisturbed run."""

import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_engine.request.sampling_params import SamplingParams
from support.engines.arithmetic_model import (
    HOST_PAGE_BYTES,
    ArithmeticFacts,
    ArithmeticRunner,
    make_folder,
    undisturbed,
)
from support.engines.block_maps import check_block_map
from support.engines.kv_layouts import LAYERS
from support.engines.kv_waste import check_waste
from support.engines.policies import POLICIES
from support.engines.speculating_model import SpeculatingRunner

FACTS = ArithmeticFacts(vocab_size=23)
PREFIXES = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 9, 9, 9], [3])


class EngineMachine(RuleBasedStateMachine):
    engine: Engine

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.expected: dict[str, list[int]] = {}
        self.seen: dict[str, list[int]] = {}
        self.prompts: dict[str, tuple[list[int], SamplingParams]] = {}
        self.num_added = 0

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.run_to_the_end()
        self.folder.cleanup()

    @initialize(
        layers=st.sampled_from(sorted(LAYERS)),
        block_size=st.sampled_from([1, 2, 4, 8]),
        num_tokens=st.integers(24, 64),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 12),
        caching=st.booleans(),
        num_host_pages=st.sampled_from([0, 0, 3, 40]),
        ahead=st.booleans(),
        num_drafts=st.integers(0, 2),
        counts_seed=st.integers(0, 99),
        policy=st.sampled_from(POLICIES),
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
    ) -> None:
        caching = caching or num_host_pages > 0  # half of the runs have a tier, so that it meets everything else
        self.facts = replace(FACTS, kv_specs=LAYERS[layers])
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

        def make_runner(_: Path, config: EngineConfig) -> ArithmeticRunner:
            if not num_drafts:
                return ArithmeticRunner(config, self.facts)
            return SpeculatingRunner(config, self.facts, num_drafts, Random(counts_seed))

        self.engine = Engine(make_folder(Path(self.folder.name)), config, make_runner=make_runner)

    @rule(
        prefix=st.sampled_from(PREFIXES),
        tail=st.lists(st.integers(0, 22), max_size=6),
        max_tokens=st.integers(1, 24),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("ab"),
    )
    def add(
        self, *, prefix: list[int], tail: list[int], max_tokens: int, ignore_eos: bool, priority: int, tenant: str
    ) -> None:
        prompt = [*prefix, *tail]
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        name = str(self.num_added)
        self.num_added += 1
        self.engine.add_request(name, prompt, params, priority=priority, tenant=tenant)
        self.prompts[name] = (prompt, params)
        self.expected[name] = undisturbed(prompt, params, FACTS, self.engine.max_model_len)
        self.seen[name] = []

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.engine.abort_request(name)
        del self.expected[name]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        """As after an engine's death: the request comes again with the tokens that were seen."""
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.engine.abort_request(name)
        prompt, params = self.prompts[name]
        self.engine.add_request(name, prompt, params, output_token_ids=self.seen[name])

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.engine.step():
                assert output.seq_id in self.expected, "an output of a request that is gone"
                assert output.token_id is not None
                seen = self.seen[output.seq_id]
                seen.append(output.token_id)
                assert seen == self.expected[output.seq_id][: len(seen)]
                if output.finish_reason is not None:
                    assert seen == self.expected.pop(output.seq_id)
            self.engine.check_invariants()

    @invariant()
    def the_bookkeeping_holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_invariants()
            assert self.engine.has_unfinished_requests() == bool(self.expected)
            check_waste(self.engine)
            check_block_map(self.engine)

    def run_to_the_end(self) -> None:
        limit = 20
        for prompt, params in self.prompts.values():
            assert params.max_tokens is not None
            limit += len(prompt) + params.max_tokens * 40
        while self.expected and limit > 0:
            self.step(times=1)
            limit -= 1
        assert not self.expected, "some request never ends"
        assert self.engine.stats().num_free_blocks == self.engine.stats().num_blocks


EngineMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase
