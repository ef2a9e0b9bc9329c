"""`pagestream serve`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import os
import shlex
import signal
import time
from dataclasses import replace

from pagestream_telemetry.environment import variable_of

from pagestream_cli.client.endpoint import known_api_key
from pagestream_cli.console import program, say
from pagestream_cli.datadir import DataDir, DataDirLock
from pagestream_cli.errors import UsageError
from pagestream_cli.keys import write_given_keys
from pagestream_cli.serve.deployment import Deployment
from pagestream_cli.serve.model import AdapterChoice, choose_model
from pagestream_cli.serve.options import ServeOptions, parse_options
from pagestream_cli.serve.plan import (
    EngineLogs,
    Plan,
    PortPlan,
    assign_ports,
    check_options,
    check_parts,
    engines_left_behind,
)
from pagestream_cli.serve.redis import check_redis, ignored_file, redis_command
from pagestream_cli.serve.report import Reporter

PAGE_VARIABLE = variable_of("GATEWAY", "page")
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end serve, also where a shell that started it in the background has it ignore SIGINT."""


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it. Returns 0 after an orderly end.

    Raises:
        CliError: an option, a port, the data folder or a part has a problem.
    """
    started = time.monotonic()
    options = parse_options(arguments)
    if options.help_all:
        from pagestream_cli.serve.help_all import print_settings

        print_settings()
        return 0
    check_options(options)
    _set_title()
    options.data_dir.create()
    options.data_dir.require_space()
    with DataDirLock(options.data_dir):
        dead_engines = engines_left_behind(options.data_dir)
        options.data_dir.serve_file.unlink(missing_ok=True)
        model = choose_model(options.model, options.served_model_name)
        ports = assign_ports(options)
        if options.given_keys:
            options = replace(options, api_keys=write_given_keys(options.data_dir, options.given_keys))
        command = _redis(options, ports)
        plan = Plan(options, ports, model)
        check_parts([*plan.engines(EngineLogs()), *plan.gateways()])
        reporter = Reporter(started=started, verbose=options.verbose)
        asyncio.run(_serve(plan, Deployment(plan, command, reporter, dead_engines), reporter))
    return 0


async def _serve(plan: Plan, deployment: Deployment, reporter: Reporter) -> None:
    if plan.options.redis_url is not None:
        await check_redis(plan.options.redis_url)
    loop = asyncio.get_running_loop()
    handled = [*ENDING_SIGNALS]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored
        handled.append(signal.SIGHUP)
    for number in handled:
        loop.add_signal_handler(number, _stop, deployment, reporter)
    reporter.say(f"starting {plan.model.name!r} from {plan.model.source} (data: {plan.options.data_dir.path})")
    if plan.options.redis_url is None and (file := ignored_file(plan.options.data_dir.redis)) is not None:
        reporter.say(f"{file} is not read: an older redis-server wrote it beside the files of the one that runs now")
    ticking = asyncio.create_task(_tick(deployment, reporter))
    running = asyncio.create_task(deployment.run())
    hosting = asyncio.create_task(_host(plan, deployment, reporter))
    try:
        await asyncio.wait([running, hosting], return_when=asyncio.FIRST_COMPLETED)
        failure = hosting.exception() if hosting.done() else None
        if failure is not None:
            deployment.supervisor.stop()
        await running
    finally:
        reporter.loaded()
        hosting.cancel()
        ticking.cancel()
        await asyncio.gather(hosting, ticking, return_exceptions=True)
        reporter.end()
        for number in handled:
            loop.remove_signal_handler(number)
    if failure is not None:
        raise failure


async def _tick(deployment: Deployment, reporter: Reporter) -> None:
    while True:
        await asyncio.sleep(1.0)
        reporter.tick(deployment.waiting)


async def _host(plan: Plan, deployment: Deployment, reporter: Reporter) -> None:
    reporter.loading(f"loading {plan.model.name}")
    if plan.options.greet is not None:  # while the engine loads, not between "ready" and the request
        await asyncio.to_thread(importlib.import_module, "pagestream_cli.serve.greet")
    await deployment.wait_ready()
    if plan.model.adapter is not None:
        await _load_adapter(plan, plan.model.adapter)
    for module in plan.options.lora_modules:
        await _load_adapter(plan, module.chosen())
    reporter.loaded()
    reporter.ready(deployment.record)
    if not plan.options.exit_after_greet:
        has_page = os.environ.get(PAGE_VARIABLE, "true").lower() in ("true", "1", "yes", "on")
        command = next_command(plan.options)
        reporter.start_screen(deployment.record, deployment.engine_facts, has_page=has_page, command=command)
    if plan.options.greet is not None:
        await _greet(plan, deployment, plan.options.greet)
    if plan.options.demo:
        await _control(plan, deployment, reporter)


async def _control(plan: Plan, deployment: Deployment, reporter: Reporter) -> None:
    """Let the page kill processes, until serve ends."""
    from pagestream_cli.page import Control, running

    urls = deployment.record.http_urls()
    control = Control(lambda: deployment.record, plan.ports.redis_url)
    async with running(control, urls) as port:
        reporter.say(f"page: {urls[0]}/#demo={port}.{control.token} (good once)")
        await asyncio.Event().wait()


async def _load_adapter(plan: Plan, adapter: AdapterChoice) -> None:
    """Let requests name the adapter that was asked for. Raises CliError where it is refused."""
    from pagestream_cli import store
    from pagestream_cli.adapters import publish

    if adapter.name == plan.model.name:
        raise UsageError(f"{adapter.name!r} is the base model's name", hint="--served-model-name names the adapter")
    async with store.opened(plan.ports.redis_url) as broker:
        await publish(broker, adapter.name, plan.model.name, str(adapter.folder))


def next_command(options: ServeOptions) -> str:
    """Return what to type next in another terminal."""
    words = [program(), "chat"]
    if options.data_dir != DataDir.at(None):
        words += ["--data-dir", str(options.data_dir.path)]
    if options.api_keys is not None and known_api_key() is None:
        words += ["--api-key", "KEY"]
    return shlex.join(words)


async def _greet(plan: Plan, deployment: Deployment, prompt: str) -> None:
    from pagestream_cli.serve.greet import examples, greet

    record = deployment.record
    key = plan.options.given_keys[0] if plan.options.given_keys else known_api_key()
    if plan.options.exit_after_greet:
        await greet(record, prompt, api_key=key)
        deployment.supervisor.stop()
        return
    with contextlib.suppress(OSError):  # the terminal is closed; the deployment continues for its clients
        await greet(record, prompt, api_key=key)
        say(examples(record, command=next_command(plan.options), has_keys=plan.options.api_keys is not None))


def _stop(deployment: Deployment, reporter: Reporter) -> None:
    again = deployment.supervisor.stopping
    reporter.loaded()
    reporter.say("ending now" if again else "ending: gateways, then engines, then Redis (Ctrl-C again: at once)")
    deployment.supervisor.stop()


def _redis(options: ServeOptions, ports: PortPlan) -> list[str] | None:
    return None if ports.redis_socket is None else redis_command(options.data_dir.redis, ports.redis_socket)


def _set_title() -> None:
    import setproctitle

    setproctitle.setproctitle("pagestream serve")
