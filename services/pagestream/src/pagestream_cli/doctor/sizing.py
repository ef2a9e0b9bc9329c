"""Say what a model needs, and what fits on cards that this machine need not have."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from pagestream_cli.errors import UsageError
from pagestream_cli.serve.model import find_demo_model

LIMIT_S = 120.0
"""Of reading a configuration, which may be on a hub."""


def size(model: str | None, gpus: Sequence[str]) -> dict[str, Any]:
    """Return what `pagestream_worker.capacity --cards` prints, which runs in a process of its own.

    Raises:
        UsageError: the model can't be sized, or a card is not known.
    """
    command = [sys.executable, "-m", "pagestream_worker.capacity", "--cards", model or str(find_demo_model())]
    for gpu in gpus:
        command += ["--gpu", gpu]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"no answer within {LIMIT_S:.0f} s", hint=f"to try without a limit: {' '.join(command)}"
        ) from error
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        raise UsageError(last.rpartition("pagestream-engine: ")[2].rpartition("error: ")[2])
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def as_text(found: dict[str, Any]) -> str:
    """Format the sizes, and a line for each card."""
    contexts = list(next(iter(found["gpus"].values()))["sequences"])
    form = f"{found['quantization']} and {found['dtype']}" if found["quantization"] else found["dtype"]
    lines = [
        f"{found['architecture']} in {form}: {found['num_parameters'] / 1e6:,.1f} M parameters, "
        f"{found['weight_bytes'] / 1e9:,.2f} GB" + _in_host_memory(found["host_weight_bytes"]),
        f"KV cache: {found['kv_bytes_per_token'] / 1024:g} KiB a token, up to {found['max_model_len']:,} tokens",
        f"activations: about {found['activation_bytes'] / 1e9:.2f} GB (an engine measures them at its start)",
        "",
        "sequences at once, by their tokens:",
        f"{'':<10}{'memory':>8}" + "".join(f"{int(context):>10,}" for context in contexts),
    ]
    for name, card in found["gpus"].items():
        cells = "".join(f"{count if count else 'none':>10}" for count in card["sequences"].values())
        ranks = f"   --tensor-parallel-size {card['ranks']}" if card["ranks"] else ""
        lines.append(f"{name:<10}{card['memory_bytes'] / 1e9:>5.0f} GB{cells}{ranks}")
    return "\n".join(lines)


def _in_host_memory(num_bytes: int) -> str:
    return f", and {num_bytes / 1e9:,.2f} GB in host memory" if num_bytes else ""
