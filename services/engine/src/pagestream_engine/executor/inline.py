"""Steps in this process."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from queue import Empty, SimpleQueue

from pagestream_engine.config import EngineConfig
from pagestream_engine.executor.base import LaunchingRunner, RunnerFactory, load_runner
from pagestream_engine.executor.preparations import AdaptingRunner, GrammarRunner, prepare
from pagestream_engine.plan import PendingResult, StepPlan, StepResult, raising
from pagestream_engine.wire.executor import Preparation, Prepared


class InlineExecutor:
    """Launches each step when it is submitted: on a CPU that computes it, on a GPU it queues it."""

    def __init__(self, make_runner: RunnerFactory, folder: Path, config: EngineConfig) -> None:
        self._runner, self.facts = load_runner(make_runner, folder, config)
        self._launched: deque[PendingResult] = deque()
        self._failed = False
        self._prepared: SimpleQueue[Prepared] = SimpleQueue()

    @property
    def overlaps(self) -> bool:
        return isinstance(self._runner, LaunchingRunner) and self._runner.launches_ahead

    def submit(self, plan: StepPlan) -> None:
        self._failed = self._failed and not plan.reset
        if self._failed:
            return
        try:
            self._launched.append(self._runner.execute(plan))
        except BaseException as error:  # noqa: BLE001 - raised by `collect`, which is where a step's errors come out
            self._failed = True
            self._launched.append(raising(error))

    def collect(self) -> StepResult:
        try:
            pending = self._launched.popleft()
            return pending()
        except BaseException:
            self._failed = True
            self._launched.clear()
            raise

    def prepare(self, wanted: Preparation) -> None:
        prepare(self._runner, wanted, self._prepared.put)

    def prepared(self, timeout_s: float) -> list[Prepared]:
        prepared: list[Prepared] = []
        try:
            while True:
                prepared.append(self._prepared.get(block=timeout_s > 0 and not prepared, timeout=timeout_s))
        except Empty:
            return prepared

    def check_alive(self) -> None:
        """Do nothing: it lives as long as its caller."""

    def close(self) -> None:
        self._launched.clear()
        if isinstance(self._runner, AdaptingRunner) and self._runner.adapters is not None:
            self._runner.adapters.close()
        if isinstance(self._runner, GrammarRunner):
            self._runner.grammars.close()
