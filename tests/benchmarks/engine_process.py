"""What it costs that the engine has a process of its own: a step's report, and the notice of its death.

    PYTHONPATH=tests python tests/benchmarks/engine_process.py [--repeats 200] [--deaths 20]

The first table has the medians of packing and reading one step's report, by the pipe's codec and as pickled objects.
The second figure is the time from SIGKILL of the process to the error in the worker, on an event loop that is otherwise
idle.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

from goals import print_goal
from pagestream_engine import Choice, EngineConfig, SamplingParams, SequenceOutput
from pagestream_engine.stats import EngineStats
from pagestream_engine.wire.worker import REPORTS, AddGroup, Figures, StepDone
from pagestream_worker.engine_core import EngineProcess
from support.engines.arithmetic_model import make_folder
from support.engines.arithmetic_worker import SlowRunner, arithmetic_program

SIZES = (1, 64, 256, 1024)
GOAL_SIZE = 256


def report(num_outputs: int) -> StepDone:
    """Return the report of a step of decodes, with ids as long as real ones."""
    stats = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 1) | {"accepted_by_position": (1,)})  # type: ignore[arg-type]
    outputs = [
        SequenceOutput(f"2a97516c-0001-{number:032x}/abcdef0123456789/0", number, " word")
        for number in range(num_outputs)
    ]
    return StepDone(outputs, 0.01, num_outputs, has_prompts=False, figures=Figures(stats, 0.01, None, 5, is_busy=True))


def median_ms(action: Callable[[], object], repeats: int) -> float:
    """Return the median duration of an action in ms."""
    times = []
    for _ in range(repeats):
        started = perf_counter()
        action()
        times.append(perf_counter() - started)
    return median(times) * 1000


def print_costs(repeats: int) -> None:
    """Print what a report costs on either side."""
    print("outputs   bytes   pack ms   read ms   objects: pack ms   read ms")
    for size in SIZES:
        step = report(size)
        body, plain = REPORTS.encode(step), pickle.dumps(step, 5)
        costs = [
            median_ms(partial(REPORTS.pack, step), repeats),
            median_ms(partial(REPORTS.decode, body), repeats),
            median_ms(partial(pickle.dumps, step, 5), repeats),
            median_ms(partial(pickle.loads, plain), repeats),
        ]
        print(f"{size:7} {len(body):7} {costs[0]:9.3f} {costs[1]:9.3f} {costs[2]:18.3f} {costs[3]:9.3f}")
        if size == GOAL_SIZE:
            print_goal(f"the worker reads a step of {size}", "< 0.3 ms", f"{costs[1]:.3f} ms")


async def notice_ms(folder: Path) -> float:
    """Kill an engine's process in its steps; return the time until the worker has the error."""
    process = EngineProcess(arithmetic_program(folder, EngineConfig(), SlowRunner))
    await process.start()
    await asyncio.wrap_future(process.loaded)
    begun = asyncio.Event()
    process.listen(on_outputs=lambda *_: begun.set(), on_begun=lambda _: None, on_step=lambda *_: None)
    process.submit(AddGroup([1, 2], [Choice("a", SamplingParams(max_tokens=None, ignore_eos=True))]))
    await begun.wait()
    started = perf_counter()
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.wait([asyncio.wrap_future(process.ended)])
    took = perf_counter() - started
    process.close()
    return took * 1000


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description="The cost of an engine in a process of its own.")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--deaths", type=int, default=20)
    options = parser.parse_args()
    print_costs(options.repeats)
    with tempfile.TemporaryDirectory() as folder:
        model = make_folder(Path(folder))
        times = [asyncio.run(notice_ms(model)) for _ in range(options.deaths)]
    print(f"from SIGKILL to the worker's error: median {median(times):.1f} ms, longest {max(times):.1f} ms")
    print_goal("a death is noticed", "<= 250 ms", f"{max(times):.1f} ms")


if __name__ == "__main__":
    main()
