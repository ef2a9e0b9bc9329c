"""The deployment of a demonstration: two engines and two gateways, in this process' care."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from pagestream_cli.datadir import DataDirLock
from pagestream_cli.errors import CliError
from pagestream_cli.serve import options as serve_options
from pagestream_cli.serve.deployment import Deployment
from pagestream_cli.serve.model import choose_model
from pagestream_cli.serve.plan import EngineLogs, Plan, assign_ports, check_options, check_parts, engines_left_behind
from pagestream_cli.serve.redis import redis_command
from pagestream_cli.serve.report import Reporter

if TYPE_CHECKING:
    from pathlib import Path

ENGINES, GATEWAYS = 2, 2
START_LIMIT_S = 300.0
"""A model of one's own may be large."""


class DemoHost:
    """A deployment that runs, whose processes may be killed."""

    def __init__(self, plan: Plan, deployment: Deployment) -> None:
        self.model = plan.model.name
        self.redis_url = plan.ports.redis_url
        self._deployment = deployment

    @property
    def urls(self) -> tuple[str, ...]:
        """Base URL of each gateway."""
        return self._deployment.record.http_urls()

    def parts(self, kind: str) -> list[str]:
        """Return the names of the parts of a kind that run now."""
        return [each.name for each in self._deployment.record.processes if each.name.startswith(kind) and each.pid]

    def kill(self, part: str) -> int:
        """kill -9 of a part; return the id of its process. Raises CliError where it has none now."""
        pid = next((each.pid for each in self._deployment.record.processes if each.name == part), None)
        if pid is None:
            raise CliError(f"{part} has no process that could be killed")
        with suppress(ProcessLookupError):  # it has just died by itself: dead it is
            os.kill(pid, signal.SIGKILL)
        return pid


@asynccontextmanager
async def running(data_dir: Path, model: str | None, dtype: str, reporter: Reporter) -> AsyncIterator[DemoHost]:
    """Run a deployment while the block lasts.

    Raises:
        CliError: a part has a problem, or the deployment isn't ready in time.
    """
    parser = argparse.ArgumentParser()
    serve_options.add_arguments(parser)
    options = serve_options.parse_options(parser.parse_args(_arguments(data_dir, model, dtype)))
    check_options(options)
    options.data_dir.create()
    options.data_dir.require_space()
    with DataDirLock(options.data_dir):
        left_behind = engines_left_behind(options.data_dir)
        ports = assign_ports(options)
        plan = Plan(options, ports, choose_model(options.model, options.served_model_name))
        check_parts([*plan.engines(EngineLogs()), *plan.gateways()])
        redis = None if ports.redis_socket is None else redis_command(options.data_dir.redis, ports.redis_socket)
        deployment = Deployment(plan, redis, reporter, left_behind)
        serving = asyncio.create_task(deployment.run())
        try:
            await _ready(deployment, serving)
            yield DemoHost(plan, deployment)
        finally:
            deployment.supervisor.stop()
            await asyncio.gather(serving, return_exceptions=True)


async def _ready(deployment: Deployment, serving: asyncio.Task[None]) -> None:
    names = [f"engine-{number}" for number in range(ENGINES)]
    supervisor = deployment.supervisor
    waiting = asyncio.gather(deployment.wait_ready(), *(supervisor.wait_ready(name) for name in names))
    either: list[asyncio.Future[Any]] = [serving, waiting]
    try:
        async with asyncio.timeout(START_LIMIT_S):
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError as error:
        raise CliError(f"the deployment was not ready after {START_LIMIT_S:g} s") from error
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    if serving.done():
        await serving  # raises what has ended it
        raise CliError("the deployment ended before it was ready")


def _arguments(data_dir: Path, model: str | None, dtype: str) -> Sequence[str]:
    return [
        *([model] if model is not None else []),
        *("--http-port", "0", "--grpc-port", "0", "--data-dir", str(data_dir)),
        *("--engines", str(ENGINES), "--gateways", str(GATEWAYS)),
        *("--dtype", dtype, "--deterministic"),
    ]


def new_reporter(*, is_quiet: bool) -> Reporter:
    """Return what prints the deployment's messages; quiet, it prints none."""
    return (_Quiet if is_quiet else Reporter)(started=time.monotonic(), verbose=False)


class _Quiet(Reporter):
    """Prints nothing: a live picture is shown in its place."""

    def say(self, text: str) -> None:
        """Do nothing."""
