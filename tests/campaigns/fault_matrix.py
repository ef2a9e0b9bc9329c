"""The kill matrix: `make faults`.

{engine, gateway, Redis, two at once} x {SIGKILL, SIGSTOP past the lease, network cut} x {queued, claimed, prefill,
first token, middle, last token, finish}; at each of these moments also Redis at its memory limit, and SIGKILL and
SIGSTOP of the process of the engine alone, and of its executor alone; SIGKILL of engines with int8 weights and a draft
model, of engines of two ranks, one of which is also killed and stopped alone, of two stages, one of which is killed
alone, of engines that change between two models, of those with a model in 4 bits, in fp8 with a scale for each block,
and of experts. In each cell every feature over both APIs at once, compared with an undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.faults.cluster import running_cluster, running_harness
from support.faults.matrix import Cell, CellResult, all_cells, covering_cells, run_cell, table
from support.faults.setups import Engines

SHOWN_FAILURES = 5


async def run(cells: Sequence[Cell], dtype: str, *, is_brief: bool) -> list[CellResult]:
    """Run cells one after the other, with engines that compute in a dtype; print each result."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        async with running_harness(Path(folder)) as harness:
            for engines in Engines:
                those = [cell for cell in cells if cell.engines is engines]
                if not those:
                    continue
                place = Path(folder) / engines.name
                async with running_cluster(place, harness, dtype=dtype, engines=engines) as cluster:
                    for cell in those:
                        result = await run_cell(cluster, cell, is_brief=is_brief)
                        results.append(result)
                        outcome = "; ".join(result.failures[:SHOWN_FAILURES]) or "equal"
                        place_and_time = f"{len(results):3}/{len(cells)}  {cell!s:48} {result.took_s:5.1f} s"
                        print(f"{place_and_time}  {outcome}", flush=True)
    return results


def main() -> int:
    """Run the command. Returns 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="?", default="", metavar="PATTERN", help='such as "gateway, SIGSTOP"')
    parser.add_argument(
        "--cover", action="store_true", help="33 cells in which all pairs of values occur, each feature over one API"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the engines")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table to it")
    arguments = parser.parse_args()
    chosen = covering_cells() if arguments.cover else all_cells()
    cells = [cell for cell in chosen if re.search(arguments.cells, str(cell))]
    if not cells:
        parser.error(f"no cell matches {arguments.cells!r}")
    results = asyncio.run(run(cells, arguments.dtype, is_brief=arguments.cover))
    lines = "\n".join(table(results))
    print(f"\n{lines}")
    if arguments.markdown is not None:
        arguments.markdown.write_text(f"{lines}\n")
    return int(any(result.failures for result in results))


if __name__ == "__main__":
    sys.exit(main())
