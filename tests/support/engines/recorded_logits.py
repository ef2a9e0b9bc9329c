"""Engines that keep the logits of every token, to compare their bits under all that may happen to a batch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pagestream_engine import Engine, EngineConfig, SamplingParams
from pagestream_engine.plan import PendingResult, StepPlan
from pagestream_engine.runner import ModelRunner
from torch import Tensor

NUM_TOKENS = 16
BLOCK_SIZE = 8
ROOMY_BLOCKS = 512
Logits = dict[tuple[str, int], Tensor]
"""By request and index of the output token."""


class RecordingRunner(ModelRunner):
    """Keeps the logits that every token was chosen from."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        super().__init__(folder, config, torch.device(config.model.device))
        self.recorded: Logits = {}
        self.names: dict[int, str] = {}
        """Of the requests, by their seeds."""
        self._present: dict[int, tuple[str, int]] = {}  # by row: request, and index of its next output token

    def execute(self, plan: StepPlan) -> PendingResult:
        rows: list[Tensor] = []
        compute = self._model.logits

        def recording(*arguments: Any) -> Tensor:
            logits = compute(*arguments)
            rows.extend(logits.clone())
            return logits

        self._model.logits = recording
        try:
            pending = super().execute(plan)
        finally:
            self._model.logits = compute
        for new in plan.added:
            self._present[new.row] = self.names[new.seed], len(new.token_ids) - new.num_prompt_tokens
        for row, logits in zip(plan.sampled_rows.tolist(), rows, strict=True):
            name, index = self._present[row]
            self.recorded[name, index] = logits
            self._present[row] = name, index + 1
        return pending


@dataclass
class Run:
    """An engine, and what it has computed."""

    folder: Path
    options: dict[str, Any]
    """Of the engine; `device` among them."""
    num_tokens: int = NUM_TOKENS
    """That each request is given."""
    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """What each request has been given."""
    runner: RecordingRunner = field(init=False)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        def make(folder: Path, config: EngineConfig) -> RecordingRunner:
            self.runner = RecordingRunner(folder, config)
            return self.runner

        options = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": ROOMY_BLOCKS, **self.options}
        self.engine = Engine(self.folder, EngineConfig.from_options(options), make_runner=make)

    def generate(self, prompts: dict[str, list[int]], given: dict[str, list[int]] | None = None) -> Logits:
        """Runs prompts together to the end, some greedy and some sampled; `given` are tokens that they go on after."""
        self.runner.recorded = {}
        self.runner.names = dict(enumerate(prompts))
        for index, (name, prompt) in enumerate(prompts.items()):
            tokens = () if given is None else given[name]
            self.engine.add_request(name, prompt, self._params(index), output_token_ids=tokens)
        self._finish()
        return self.runner.recorded

    def alone(self, prompts: dict[str, list[int]]) -> Logits:
        """Runs each prompt by itself."""
        self.runner.recorded = {}
        self.runner.names = dict(enumerate(prompts))
        for index, (name, prompt) in enumerate(prompts.items()):
            self.engine.add_request(name, prompt, self._params(index))
            self._finish()
        return self.runner.recorded

    def _finish(self) -> None:
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.token_id is not None:
                    self.tokens[output.seq_id].append(output.token_id)
        self.engine.check_invariants()

    def _params(self, index: int) -> SamplingParams:
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9},
            {"min_p": 0.05, "top_k": 9},
        ]
        return SamplingParams(**kinds[index % 3], seed=index, max_tokens=self.num_tokens, ignore_eos=True)


def differences(got: Logits, expected: Logits) -> list[tuple[str, int]]:
    """The tokens whose logits have other bits; AssertionError where they are not those of the same tokens."""
    assert got.keys() == expected.keys()
    return [key for key, logits in expected.items() if not torch.equal(got[key], logits)]


class Comparison:
    """Requests, and their logits when each runs alone."""

    def __init__(self, folder: Path, options: dict[str, Any], prompts: dict[str, list[int]], num_tokens: int) -> None:
        self._folder, self._options, self._prompts = folder, options, prompts
        self._alone = Run(folder, {**options, "enable_prefix_caching": False}, num_tokens)
        self._expected = self._alone.alone(prompts)
        self.num_compared = len(self._expected)
        """Tokens of all requests."""

    def together(self, **changes: Any) -> dict[str, int]:
        """Run them together under changed options. Return how many tokens have other logits, and preemptions."""
        run = Run(self._folder, {**self._options, "enable_prefix_caching": False, **changes}, self._alone.num_tokens)
        got = run.generate(self._prompts)
        return {
            "differing": len(differences(got, self._expected)),
            "preemptions": run.engine.stats().num_preemptions,
        }

    def resumed(self, **changes: Any) -> dict[str, int]:
        """Let requests go on before their last token, from nothing and from a prefix cache, under changed options. Then
        the next turn of the last one's conversation begins with what is cached of it.

        Returns:
            How many tokens have other logits, how many prompt tokens the next turn found in the cache, and how many
            kernels were compiled after the warm-up.
        """
        num_tokens = self._alone.num_tokens
        given = {name: tokens[:-1] for name, tokens in self._alone.tokens.items()}
        left = {key: logits for key, logits in self._expected.items() if key[1] == num_tokens - 1}
        run = Run(self._folder, {**self._options, **changes}, num_tokens)
        found = {
            "differing": len(differences(run.generate(self._prompts, given), left)),
            "differing on a cache": len(differences(run.generate(self._prompts, given), left)),
        }
        last = [*self._prompts][-1]
        turns = {f"{last}, next turn": self._prompts[last] + self._alone.tokens[last] + [5, 7]}
        self._alone.num_tokens = run.num_tokens = 1
        before = run.engine.stats().prefix_hit_tokens
        found["differing in the next turn"] = len(differences(run.generate(turns), self._alone.alone(turns)))
        found["cached tokens of the next turn"] = run.engine.stats().prefix_hit_tokens - before
        found["late compilations"] = run.runner.num_late_compilations
        return found
