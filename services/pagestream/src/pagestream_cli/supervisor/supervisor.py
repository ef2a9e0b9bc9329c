"""The supervisor of a deployment's parts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

from pagestream_cli.supervisor.listener import Listener, notify
from pagestream_cli.supervisor.part import PartSpec, PartView
from pagestream_cli.supervisor.part_runner import PartRunner
from pagestream_cli.supervisor.restart import Death, RestartPolicy
from pagestream_cli.supervisor.spares import Spares


class Supervisor:
    """Run parts until `stop`. The parts die with the supervisor's process, even where that is killed.

    Args:
        parts: what to run.
        listener: notified of each change.
        policy: delays of restarts.
        num_spares: how many of the parts with a `standby` wait as spares; the last ones at first.
    """

    def __init__(
        self,
        parts: Sequence[PartSpec],
        listener: Listener,
        policy: RestartPolicy | None = None,
        *,
        num_spares: int = 0,
    ) -> None:
        self._listener = listener
        self._spares = Spares(sum(spec.standby is not None for spec in parts) - num_spares)
        chosen = policy or RestartPolicy()
        self._runners = [self._runner(spec, chosen) for spec in parts]
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Start all parts at once, keep them running, and after `stop` drain them stage by stage.

        Raises:
            PartFailedError: a part cannot be started; the others have been drained.
        """
        running = [asyncio.create_task(runner.run(), name=runner.spec.name) for runner in self._runners]
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([*running, stopping], return_when=asyncio.FIRST_COMPLETED)
            await self._drain()
        finally:
            stopping.cancel()
            self._kill()
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def stop(self) -> None:
        """Drain the parts; a second call kills them."""
        if self._stop.is_set():
            self._kill()
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    async def wait_ready(self, name: str) -> None:
        """Wait until a part is ready. Without a limit: the caller sets one, or ends with `run`."""
        await next(runner for runner in self._runners if runner.spec.name == name).ready.wait()

    @property
    def views(self) -> list[PartView]:
        """The current state of all parts, in the given order."""
        return [runner.view for runner in self._runners]

    async def _drain(self) -> None:
        by_stage = sorted(self._runners, key=lambda runner: runner.spec.drain_stage)
        for _, stage in groupby(by_stage, key=lambda runner: runner.spec.drain_stage):
            await asyncio.gather(*(runner.drain() for runner in stage))

    def _kill(self) -> None:
        for runner in self._runners:
            runner.kill()

    def _runner(self, spec: PartSpec, policy: RestartPolicy) -> PartRunner:
        def on_change(runner: PartRunner, death: Death | None) -> None:
            if death is not None:
                notify(self._listener.died, runner.view, death, runner.last_delay_s)
            self._spares.note_change()
            notify(self._listener.changed, self.views)

        return PartRunner(
            spec,
            policy=spec.policy or policy,
            on_change=on_change,
            on_line=lambda text: self._listener.line(spec, text),
            spares=None if spec.standby is None else self._spares,
        )
