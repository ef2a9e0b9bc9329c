"""Write the tables of docs/sizing.md: what common models need, and how many sequences common cards hold.

    python tools/write_sizing.py [--check]

The sizes of the models (tools/sizing_models.json) are those of the configurations that their publishers ship; the
figures come from `pagestream_engine.sizing`, as those of `pagestream doctor --gpu` do.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from pagestream_engine.config import EngineConfig
from pagestream_engine.models.config import ConfigFile
from pagestream_engine.sizing import CARDS, GB, ModelSize, fewest_ranks, size_config

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "sizing.md"
MODELS = Path(__file__).with_name("sizing_models.json")
BEGIN, END = "<!-- tables -->", "<!-- end of tables -->"
CONTEXT = 4096


def sizes() -> dict[str, ModelSize]:
    """Return the size of each model, by name."""
    return {each["name"]: size_config(ConfigFile(each["config"]), EngineConfig()) for each in read_models()}


def read_models() -> list[dict[str, Any]]:
    """Return name, source, published parameters in billions, and configuration of each model."""
    models: list[dict[str, Any]] = json.loads(MODELS.read_text())
    return models


def tables(found: dict[str, ModelSize]) -> str:
    """Return the page's two tables."""
    lines = [
        "| model | parameters | weights, GB | KV cache, KiB a token | one sequence of 4,096 tokens, MB | context |",
        "|---|---|---|---|---|---|",
    ]
    for name, size in found.items():
        blocks = size.layout.num_blocks_for(CONTEXT, size.max_chunk)
        lines.append(
            f"| {name} | {size.num_parameters / 1e9:.2f} B | {size.weight_bytes / GB:.1f} | "
            f"{size.kv_bytes_per_token / 1024:g} | {blocks * size.block_bytes / 1e6:.0f} | {size.max_model_len:,} |"
        )
    lines += ["", f"Sequences of {CONTEXT:,} tokens that one card holds at once; `4x 17` is 17 on four cards:", ""]
    lines += [f"| model | {' | '.join(CARDS)} |", "|---|" + "---|" * len(CARDS)]
    for each in read_models():
        file = ConfigFile(each["config"])
        held = [fewest_ranks(file, EngineConfig(), memory, CONTEXT) for memory in CARDS.values()]
        lines.append(f"| {each['name']} | {' | '.join(map(_cell, held))} |")
    return "\n".join(lines)


def _cell(held: tuple[int, int] | None) -> str:
    if held is None:
        return "none"
    num_ranks, num_sequences = held
    return f"{num_sequences:,}" if num_ranks == 1 else f"{num_ranks}x {num_sequences:,}"


def page(text: str) -> str:
    """Return the page with the tables of now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables(sizes())}\n\n{END}{after}"


def main() -> int:
    """Write the page, or check it. Returns 1 where it is not what it would be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = PAGE.read_text()
    wanted = page(text)
    if options.check:
        return int(text != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
