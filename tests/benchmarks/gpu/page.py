"""The page of GPU figures, from the JSON of a run; what no run has measured is "not yet measured"."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

NOT_MEASURED = "not yet measured"
Column = tuple[str, Callable[[Mapping[str, Any]], str]]


def _number(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: NOT_MEASURED if row.get(key) is None else form.format(row[key])


_TIMES: tuple[Column, ...] = (
    ("time", _number("ms", "{:.3f} ms")),
    ("share of a copy's bandwidth", _number("copy_share", "{:.0%}")),
    ("TFLOP/s", _number("teraflops", "{:.1f}")),
)
SECTIONS: Mapping[str, tuple[str, str, tuple[Column, ...]]] = {
    "decode": ("Decode attention", "Replays of a CUDA graph over buffers above the L2.", _TIMES),
    "contiguous": (
        "Paged against contiguous",
        "The PagedAttention paper gives its kernel as 20 to 26 % slower than one over contiguous memory.",
        _TIMES,
    ),
    "prefill": ("Prefill attention", "Whole prompts, and chunks after a cached prefix.", _TIMES),
    "linears": (
        "Linears",
        "With one tile for any number of rows, as in deterministic mode, beside torch's; Llama 3.1 8B's weights.",
        _TIMES,
    ),
    "sampling": ("Sampling", "Filters and draw in one kernel.", _TIMES),
    "engine": (
        "The engine",
        "A Llama of 16 layers with random weights in bfloat16, prompts of 32 to 255 tokens, 128 output tokens each.",
        (
            ("output", _number("tokens_per_s", "{:,.0f} tokens/s")),
            ("compiled while serving", _number("late_compilations", "{}")),
        ),
    ),
    "launch": (
        "Host time of a launch",
        "Design: [attention kernels](../design/attention-kernels.md).",
        (
            ("by our launcher", _number("launcher_us", "{:.1f} us")),
            ("by Triton's", _number("triton_us", "{:.1f} us")),
        ),
    ),
}


def page(record: Mapping[str, Any] | None) -> str:
    """Return the page in Markdown.

    Args:
        record: what `run.py` has written on a GPU; None: no run yet.
    """
    lines = ["# On a GPU", "", "Written by `make gpu`, which runs on one GPU in under 10 minutes; do not edit.", ""]
    if record is None:
        lines += [f"No run has been made on a GPU yet: every figure is {NOT_MEASURED}.", ""]
    else:
        lines += [
            f"{record['gpu']}, torch {record['torch']}, CUDA {record['cuda']}; a copy reaches "
            f"{record['copy_gigabytes_per_s']:,.0f} GB/s. Tests in `tests/gpu`: {record['correctness']}.",
            "",
        ]
    for key, (title, note, columns) in SECTIONS.items():
        rows = [] if record is None else record["sections"].get(key, [])
        lines += [f"## {title}", "", note, ""]
        lines += ["| case | " + " | ".join(name for name, _ in columns) + " |", "|---" * (1 + len(columns)) + "|"]
        cells = [[row["name"], *(show(row) for _, show in columns)] for row in rows]
        lines += [f"| {' | '.join(row)} |" for row in cells or [["all", *([NOT_MEASURED] * len(columns))]]]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
