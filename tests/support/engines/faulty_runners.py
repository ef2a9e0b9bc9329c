"""Runners that fail or die at a step, as functions and classes that an executor's process can import."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from pagestream_engine import ConfigError, EngineConfig, OutOfMemory
from pagestream_engine.plan import PendingResult, StepPlan, StepResult
from support.engines.arithmetic_model import ArithmeticFacts, SeededRunner

FACTS = ArithmeticFacts(vocab_size=23)
COMPUTING = "computing"
"""File in the model folder by which a runner says that its endless step computes."""


class FaultyRunner(SeededRunner):
    """Does once, at the first step from the one on that its rank's file says, what the file says.

    `kill` and `stop` are signals; `raise` is a step that ran out of memory, `raise unpicklable` what a library may
    raise; with `differ` the rank samples other tokens than the others.
    """

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        super().__init__(config, FACTS)
        self._file = rank_file(folder, config.rank.index)

    def execute(self, plan: StepPlan) -> PendingResult:
        fault = self._take_fault()
        if fault == "raise":
            raise OutOfMemory("no memory for this step")
        if fault == "raise unpicklable":
            raise Unpicklable(lambda: None)
        if fault in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        if fault != "differ":
            return super().execute(plan)
        result = super().execute(plan)()
        return lambda: replace(result, token_ids=result.token_ids + 1)

    def _take_fault(self) -> str:
        if not self._file.exists():
            return ""
        step, _, fault = self._file.read_text().partition(" ")
        if not fault or self.num_steps < int(step):
            return ""
        self._file.unlink()
        return fault


def rank_file(folder: Path, rank: int = 0) -> Path:
    """File of a rank's fault: the number of the first step at which it happens, and the fault."""
    return folder / f"fault_of_rank_{rank}"


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


class DeviceBoundRunner(SeededRunner):
    """Fails a step whose result is waited for by a thread that has not selected the device."""

    def __init__(self, folder: Path, config: EngineConfig) -> None:
        super().__init__(config, FACTS)
        self._selected: set[int] = set()

    def select_device(self) -> None:
        self._selected.add(threading.get_ident())

    def execute(self, plan: StepPlan) -> PendingResult:
        pending = super().execute(plan)

        def wait() -> StepResult:
            if threading.get_ident() not in self._selected:
                raise RuntimeError("a thread waits for the device, and opens a context on GPU 0")
            return pending()

        return wait


class Unpicklable(Exception):  # noqa: N818
    """As a library may raise one."""


def refuse_to_load(folder: Path, config: EngineConfig) -> FaultyRunner:
    """Fail as a runner whose device is missing; of several ranks the second one alone, for which the first waits."""
    if config.rank.size > 1 and config.rank.index != 1:
        time.sleep(3600)
    raise ConfigError("device", "cuda", "cpu or auto", "torch finds no GPU on this machine")


def die_while_loading(folder: Path, config: EngineConfig) -> FaultyRunner:
    """End the process as the kernel does where memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)
    return FaultyRunner(folder, config)
