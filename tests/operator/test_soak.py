"""A minute of the soak (`make soak`): pools are as ordered after each burst of faults, and no two replicas lead."""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.kube, pytest.mark.slow, pytest.mark.timeout(900)]

LIMIT_S = 170.0
"""For a machine at a quarter of its speed; the campaign wants 30 s."""


def test_pools_are_as_ordered_after_each_burst_of_faults(tmp_path: Path) -> None:
    from campaigns.soaking.rounds import soak

    report = soak(tmp_path, minutes=1, seed=7, limit_s=LIMIT_S)
    print(report.table())
    assert report.failures == []
    assert report.rounds > 0
    assert report.orders.total() >= 3 * report.rounds
