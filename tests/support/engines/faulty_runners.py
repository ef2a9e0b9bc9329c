"""Runners that fail or die at a step, as functions and classes that an executor's process can import."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError
from pagestream_engine.step.pending import PendingResult
from pagestream_engine.step.records import StepPlan, StepResult
from support.engines.arithmetic_model import ArithmeticFacts, SeededRunner

FACTS = ArithmeticFacts(vocab_size=23)
COMPUTING = "computing"
LAST_STEP = "last_step"
"""File in the model folder with the number of the step at which the runner fails once, and what it does: an int, then
`kill` or `raise`."""


class FaultyRunner(SeededRunner):
    """Does once, at the step that a file says, what it says."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        super().__init__(config, FACTS)
        self._file = folder / LAST_STEP

    def execute(self, plan: StepPlan) -> PendingResult:
        if self._file.exists():
            step, _, fault = self._file.read_text().partition(" ")
            if self.num_steps == int(step):
                self._file.unlink()
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise Unpicklable(lambda: None)
        return super().execute(plan)


class UnendingRunner(SeededRunner):
    """Its steps compute in C++ for ever. The first one writes a file, named COMPUTING."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        super().__init__(config, FACTS)
        self._file = folder / COMPUTING

    def execute(self, plan: StepPlan) -> PendingResult:
        super().execute(plan)
        return self._compute

    def _compute(self) -> StepResult:
        import torch

        square = torch.zeros(512, 512)
        while True:
            torch.mm(square, square)
            self._file.touch()


class Unpicklable(Exception):  # noqa: N818
    """As a library may raise one."""


def make_faulty_runner(folder: Path, config: EngineConfig) -> FaultyRunner:
    """Return a runner that reads its fault from the folder."""
    return FaultyRunner(folder, config)


def make_unending_runner(folder: Path, config: EngineConfig) -> UnendingRunner:
    """Return a runner whose steps don't end."""
    return UnendingRunner(folder, config)


def refuse_to_load(folder: Path, config: EngineConfig) -> FaultyRunner:
    """Fail as a runner whose device is missing."""
    raise ConfigError("device", "cuda", "cpu or auto", "torch finds no GPU on this machine")


def die_while_loading(folder: Path, config: EngineConfig) -> FaultyRunner:
    """End the process as the kernel does where memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return make_faulty_runner(folder, config)
