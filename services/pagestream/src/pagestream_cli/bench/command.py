"""`pagestream bench`."""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pagestream_simulator.load import read_trace, scale_factor, scale_to_context

from pagestream_cli.bench.http_client import HttpClient
from pagestream_cli.bench.load import (
    BenchRequest,
    LoadClient,
    from_prompts,
    from_random,
    from_trace,
    run_load,
    with_poisson,
)
from pagestream_cli.bench.results import (
    INTERRUPTED,
    Outcome,
    Run,
    as_text,
    require_matplotlib,
    summarize,
    write_json,
    write_plot,
)
from pagestream_cli.client.endpoint import Endpoint, find_endpoint
from pagestream_cli.client.gateways import choose_model, list_models, telling_unserved
from pagestream_cli.console import is_watched, say
from pagestream_cli.datadir import DataDir, read_record
from pagestream_cli.errors import ServerNotFoundError, UsageError

RANDOM_REQUESTS = 64


def run(arguments: argparse.Namespace) -> int:
    """Run the load; print and write the measurements, also those until a Ctrl-C. Returns 1 when a request failed, and
    130 after a Ctrl-C.

    Raises:
        CliError: no server, or a workload that cannot be read.
    """
    check(arguments)
    result = asyncio.run(_bench(arguments))
    print(as_text(result))
    if arguments.output is not None:
        write_json(result, arguments.output)
    if arguments.plot is not None:
        write_plot(result, arguments.plot)
    if (asked := result.settings.get("interrupted_of")) is not None:
        say(f"interrupted: {len(result.outcomes)} of {asked} requests were sent")
        return 128 + signal.SIGINT
    return 1 if result.summary.errors else 0


def check(arguments: argparse.Namespace) -> None:
    """Check the options against each other and against their ranges.

    Raises:
        UsageError: one is out of range; the message names it.
    """
    for option in ("request_rate", "time_scale", "concurrency", "request_timeout", "num_requests", "vocab_size"):
        value = getattr(arguments, option)
        if value is not None and not value > 0:
            raise UsageError(f"--{option.replace('_', '-')} {value}: a number above 0 is expected")
    if arguments.scale_to_context is not None and arguments.trace is None:
        raise UsageError("--scale-to-context needs --trace: other lengths are given in tokens")
    if arguments.plot is not None:
        require_matplotlib()


async def _bench(arguments: argparse.Namespace) -> Run:
    endpoint = find_endpoint(arguments.url, DataDir.at(arguments.data_dir), arguments.api_key)
    model = await choose_model(endpoint, arguments.model)
    settings: dict[str, Any] = {"model": model, "seed": arguments.seed}
    requests = await _workload(arguments, endpoint, model, settings)
    client = _client(arguments, endpoint, model, settings)
    try:
        async with telling_unserved(endpoint, model):
            with _progress(len(requests)) as on_done:
                outcomes = await run_load(
                    client,
                    requests,
                    concurrency=arguments.concurrency,
                    timeout_s=arguments.request_timeout,
                    on_done=on_done,
                )
    finally:
        await client.close()
    if len(outcomes) < len(requests) or any(outcome.error == INTERRUPTED for outcome in outcomes):
        settings["interrupted_of"] = len(requests)
    return Run(shlex.join(["pagestream", *sys.argv[1:]]), settings, summarize(outcomes), outcomes)


async def _workload(
    arguments: argparse.Namespace, endpoint: Endpoint, model: str, settings: dict[str, Any]
) -> list[BenchRequest]:
    rng = random.Random(arguments.seed)
    if arguments.trace is not None:
        requests = await _trace_requests(arguments, endpoint, model, settings)
    elif arguments.prompts is not None:
        requests = from_prompts(arguments.prompts, arguments.random_output_len, rng, arguments.num_requests)
    else:
        count = arguments.num_requests or RANDOM_REQUESTS
        requests = from_random(
            count, arguments.random_input_len, arguments.random_output_len, arguments.vocab_size, rng
        )
    if arguments.request_rate is not None:
        requests = with_poisson(requests, arguments.request_rate, rng)
    return requests


async def _trace_requests(
    arguments: argparse.Namespace, endpoint: Endpoint, model: str, settings: dict[str, Any]
) -> list[BenchRequest]:
    rows = read_trace(arguments.trace, arguments.num_requests)
    if arguments.scale_to_context is not None:
        context = arguments.scale_to_context or (await list_models(endpoint)).get(model)
        if context is None:
            raise UsageError(
                "the server does not report the model's context length", hint="give it: --scale-to-context N"
            )
        settings |= {"context": context, "length_factor": round(scale_factor(rows, context), 6)}
        rows = scale_to_context(rows, context)
    closed_loop = arguments.concurrency is not None and arguments.request_rate is None
    return from_trace(rows, arguments.vocab_size, float("inf") if closed_loop else arguments.time_scale, arguments.seed)


def _client(arguments: argparse.Namespace, endpoint: Endpoint, model: str, settings: dict[str, Any]) -> LoadClient:
    if arguments.grpc is None:
        settings["api"] = "http"
        return HttpClient(endpoint, model, arguments.temperature)
    from pagestream_cli.bench.grpc_client import GrpcClient

    settings["api"] = "grpc"
    return GrpcClient(_grpc_targets(arguments), endpoint, model, arguments.temperature)


def _grpc_targets(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.grpc:
        return (arguments.grpc,)
    record = read_record(DataDir.at(arguments.data_dir).serve_file)
    if record is None or arguments.url is not None:
        raise ServerNotFoundError("--grpc needs HOST:PORT where no pagestream serve runs in the data folder")
    return record.grpc_targets()


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Outcome], None]]:
    if not is_watched():
        yield lambda outcome: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{total} requests", total=total)

        def done(outcome: Outcome) -> None:
            progress.advance(task)
            if outcome.error:
                say(f"{outcome.error}: {outcome.message}")

        yield done
