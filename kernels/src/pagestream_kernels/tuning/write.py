"""`make kernel-tables`: builds every way of cutting the attention kernels, times them where a GPU is there, and writes
the tables."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pagestream_kernels.aot import TARGETS
from pagestream_kernels.runtime import triton
from pagestream_kernels.tables.rows import CHIPS, Row, RowKey
from pagestream_kernels.tuning.filter import RULE, candidates, passes, row_keys
from pagestream_kernels.tuning.sources import KERNELS, source_hash
from pagestream_kernels.tuning.timing import fastest, microseconds

BUILT = "built, not timed"
TIMED = "timed"
MAX_TIMED = 6  # candidates of a row


@dataclass(frozen=True, slots=True)
class Chip:
    """A GPU that gets a table."""

    target: str  # of `aot.TARGETS`
    names: tuple[str, ...]  # parts of the name that the driver gives


KNOWN: Mapping[str, Chip] = {
    "a100": Chip("sm_80", ("A100",)),
    "h100": Chip("sm_90", ("H100",)),
    "h200": Chip("sm_90", ("H200",)),  # GH200 contains it, too
    "b200": Chip("sm_100", ("B200",)),  # and GB200
    "mi300x": Chip("gfx942", ("MI300X",)),
}


@lru_cache(maxsize=1024)
def built_rows(target: str, key: RowKey, count: int) -> tuple[Row, ...]:
    """The first `count` candidates that pass the filter."""
    found: list[Row] = []
    for row in candidates(key, TARGETS[target]):
        built = passes(key, row, TARGETS[target])
        if built is not None:
            found.append(built)
        if len(found) == count:
            break
    return tuple(found)


def make_rows(chip: Chip, kept: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The entries of a chip's table; those of `kept` are taken over."""
    has_gpu = torch.cuda.is_available() and any(name in torch.cuda.get_device_name() for name in chip.names)
    known = {RowKey(*(entry[name] for name in RowKey._fields)): dict(entry) for entry in kept}
    for key in row_keys(chip.target):
        if key in known:
            yield known[key]
            continue
        print(*key, file=sys.stderr)  # noqa: T201
        rows = built_rows(chip.target, key, MAX_TIMED if has_gpu else 1)
        if not rows:
            continue  # the rule for unknown chips serves it
        row = fastest(key, rows, torch.device("cuda"), microseconds) if has_gpu else rows[0]
        yield {**key._asdict(), **row._asdict(), "chosen": TIMED if has_gpu else BUILT}


def write_table(name: str, folder: Path, *, again: bool) -> Path:
    """Write the table of a chip; rows of kernels that have not changed are taken over unless `again`."""
    path, chip = folder / f"{name}.json", KNOWN[name]
    now = {operator: source_hash(operator) for operator in KERNELS}
    kept: list[Mapping[str, Any]] = []
    if path.exists() and not again:
        before = json.loads(path.read_text())
        same = [operator for operator in now if before["sources"].get(operator) == now[operator]]
        kept = [entry for entry in before["rows"] if entry["operator"] in same]
    head = {"names": chip.names, "target": chip.target, "triton": triton.__version__, "sources": now, "rule": RULE}
    rows = ",\n".join("  " + json.dumps(entry) for entry in make_rows(chip, kept))
    path.write_text(json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n' + rows + "\n ]\n}\n")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(description="Write the tables of tile sizes.")
    parser.add_argument("chips", nargs="*", metavar="CHIP", help=f"of {', '.join(KNOWN)}; default: all")
    parser.add_argument("--out", type=Path, default=CHIPS, metavar="FOLDER")
    parser.add_argument("--again", action="store_true", help="also the rows of kernels that have not changed")
    given = parser.parse_args(arguments)
    unknown = set(given.chips) - set(KNOWN)
    if unknown:
        parser.error(f"expected chips of {', '.join(KNOWN)}, got {', '.join(sorted(unknown))}")
    for chip in given.chips or KNOWN:
        print(write_table(chip, given.out, again=given.again), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
