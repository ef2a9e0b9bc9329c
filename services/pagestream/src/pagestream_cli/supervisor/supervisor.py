"""Keeps the parts of a deployment running, and ends them in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import groupby

from pagestream_cli.supervisor.keeper import Keeper
from pagestream_cli.supervisor.listener import Listener, notify
from pagestream_cli.supervisor.part import PartSpec, PartView
from pagestream_cli.supervisor.restart import Death, RestartPolicy


class Supervisor:
    """Runs parts until it is told to stop. Its parts die with its process, even when that is killed."""

    def __init__(self, parts: Sequence[PartSpec], listener: Listener, policy: RestartPolicy | None = None) -> None:
        self._listener = listener
        chosen = policy or RestartPolicy()
        self._keepers = [self._keeper(spec, chosen) for spec in parts]
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Start all parts at once, keep them running, and after `stop` drain them stage by stage.

        Raises:
            PartFailedError: a part cannot be started; the others have been drained.
        """
        running = [asyncio.create_task(keeper.run(), name=keeper.spec.name) for keeper in self._keepers]
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
        """Drain the parts; asked a second time, kill them."""
        if self._stop.is_set():
            self._kill()
        self._stop.set()

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stop.is_set()

    async def wait_ready(self, name: str) -> None:
        """Wait until a part is ready. No limit of its own: the caller has one, or ends with `run`."""
        await next(keeper for keeper in self._keepers if keeper.spec.name == name).ready.wait()

    @property
    def views(self) -> list[PartView]:
        """All parts now, in the order in which they were given."""
        return [keeper.view for keeper in self._keepers]

    async def _drain(self) -> None:
        by_stage = sorted(self._keepers, key=lambda keeper: keeper.spec.drain_stage)
        for _, stage in groupby(by_stage, key=lambda keeper: keeper.spec.drain_stage):
            await asyncio.gather(*(keeper.drain() for keeper in stage))

    def _kill(self) -> None:
        for keeper in self._keepers:
            keeper.kill()

    def _keeper(self, spec: PartSpec, policy: RestartPolicy) -> Keeper:
        def on_change(keeper: Keeper, death: Death | None) -> None:
            if death is not None:
                notify(self._listener.died, keeper.view, death, keeper.last_delay_s)
            notify(self._listener.changed, self.views)

        return Keeper(spec, policy=policy, on_change=on_change, on_line=lambda text: self._listener.line(spec, text))
