"""Some cells of the kill matrix: each part of a deployment killed, stopped or cut off.

CI runs a cover of all pairs (`make faults ARGS=--cover`), and `make faults` all 189 cells.
"""

from pathlib import Path

import pytest
from support.faults.cluster import running_cluster, running_harness
from support.faults.matrix import brief_cells, run_cell, table

# CI runs the whole cover, of which this is a part: `make faults ARGS=--cover`.
pytestmark = [pytest.mark.served, pytest.mark.slow, pytest.mark.timeout(600)]


async def test_streams_are_equal_whatever_is_killed_stopped_or_cut_off(tmp_path: Path) -> None:
    async with running_harness(tmp_path) as harness, running_cluster(tmp_path / "cluster", harness) as cluster:
        results = [await run_cell(cluster, cell, is_brief=True) for cell in brief_cells()]

    print("\n".join(table(results)))
    assert [f"{each.cell}: {failure}" for each in results for failure in each.failures] == []
    missed = [str(each.cell) for each in results if not each.unfinished]
    assert missed == [], "no stream was open when the fault was injected"
    assert sum(each.swapped_bytes for each in results) > 0
