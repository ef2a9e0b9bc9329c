"""Runners that fail or die at a step, as functions and classes that an executor's process can import."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError, OutOfMemory
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


class FaultyRank(SeededRunner):
    """Does once, at the step that its rank's file says, what it says: `kill`, `stop`, `raise`, or `differ`."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        super().__init__(config, FACTS)
        self._file = rank_file(folder, config.place.rank)

    def execute(self, plan: StepPlan) -> PendingResult:
        fault = self._take_fault()
        if fault == "raise":
            raise OutOfMemory("no memory for this step")
        if fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        result = super().execute(plan)()
        if fault == "differ":
            result = replace(result, token_ids=result.token_ids + 1)
        return lambda: result

    def _take_fault(self) -> str:
        if not self._file.exists():
            return ""
        step, _, fault = self._file.read_text().partition(" ")
        if not fault or self.num_steps < int(step):
            return ""
        self._file.unlink()
        return fault


def rank_file(folder: Path, rank: int) -> Path:
    """File of a rank's fault: the number of the first step at which it happens, and the fault."""
    return folder / f"fault_of_rank_{rank}"


def make_faulty_rank(folder: Path, config: EngineConfig) -> FaultyRank:
    """Return a runner that reads its rank's fault from the folder."""
    return FaultyRank(folder, config)


def refuse_on_rank_1(folder: Path, config: EngineConfig) -> FaultyRank:
    """Fail on one rank; the other one waits for it."""
    if config.place.rank == 1:
        return refuse_rank()
    time.sleep(3600)
    return FaultyRank(folder, config)


def refuse_rank() -> FaultyRank:
    """Fail as a rank without a device."""
    raise ConfigError("device", "cuda", "cpu or auto", "torch finds no GPU on this machine")


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
