"""Whether the deterministic mode is on by default on this machine, and what its linears cost here."""

from __future__ import annotations

from collections.abc import Iterator

from pagestream_cli.doctor.finding import Finding, ok

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
