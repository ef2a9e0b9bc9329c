"""Check how long a sequence an engine would take on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from pagestream_cli.datadir import DataDir
from pagestream_cli.doctor.finding import Finding, ok, problem, warning
from pagestream_cli.doctor.place import is_serving, sound_model, weight_bytes

LARGEST_LOADED_BYTES = 2 * 10**9
"""Weights that the check loads to measure; larger ones would take minutes, and the memory of what runs."""
LIMIT_S = 120.0
"""Of the measurement, which compiles C++ where that has not been done on this machine."""
_SUBJECT = "context"
_PROGRAM = "pagestream_worker.capacity"


def check_context(model: str | None, data_dir: DataDir) -> Iterator[Finding]:
    """Load a sound model in a process of its own, and report the longest sequence that fits.

    Args:
        model: folder; None is the demo model.
        data_dir: while its serve runs, an engine has the memory, and nothing is measured.
    """
    folder = sound_model(model)
    if isinstance(folder, Finding):
        return
    command = [sys.executable, "-m", _PROGRAM, str(folder)]
    by_hand = " ".join(command)
    size = weight_bytes(folder)
    if is_serving(data_dir):
        yield ok(_SUBJECT, f"not measured while serve runs; later: {by_hand}")
        return
    if size > LARGEST_LOADED_BYTES:
        yield ok(_SUBJECT, f"not measured, as that loads {size / 1e9:.1f} GB; to do so: {by_hand}")
        return
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        yield warning(_SUBJECT, f"not measured within {LIMIT_S:.0f} s", f"to try without a limit: {by_hand}")
        return
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        advice = "an engine would end with this message; PAGESTREAM_ENGINE__* variables and options change it"
        yield problem(_SUBJECT, last.removeprefix("pagestream-engine: "), advice)
        return
    yield _finding(json.loads(ended.stdout.splitlines()[-1]))  # after what a plugin or modelling code prints


def _finding(capacity: dict[str, int]) -> Finding:
    longest, of_model = capacity["max_model_len"], capacity["model_context"]
    pool = f"the KV pool holds {capacity['num_sequences']:,} such sequences"
    if longest >= of_model:
        return ok(_SUBJECT, f"{longest:,} tokens, the model's own; {pool}")
    return warning(
        _SUBJECT,
        f"{longest:,} tokens of the model's {of_model:,}; {pool}",
        "free memory; on a CPU --num-gpu-blocks-override takes more than the usual quarter, at most 4 GiB",
    )
