"""The law on a recorded trace, through the small fluid pool; the whole study is `pagestream simulate`."""

from __future__ import annotations

import pytest
from pagestream_scaling import ScalingPolicy
from pagestream_simulator import read_trace
from scaling.worlds import FluidPool

pytestmark = pytest.mark.served


@pytest.fixture(scope="module")
def arrivals() -> list[float]:
    """Prompt tokens of the packaged sample in each second of it."""
    rows = read_trace("sample")
    seconds = [0.0] * (int(rows[-1].arrival_s) + 1)
    for row in rows:
        seconds[int(row.arrival_s)] += row.input_tokens
    return seconds


@pytest.mark.parametrize("startup_s", [8.0, 60.0])
def test_a_recorded_day_is_served_without_a_lasting_queue_and_without_a_fleet(
    arrivals: list[float], startup_s: float
) -> None:
    busiest = max(sum(arrivals[second : second + 60]) / 60 for second in range(max(1, len(arrivals) - 60)))
    capacity = busiest / 10  # ten pods for the busiest minute
    policy = ScalingPolicy(min_replicas=1, max_replicas=40)
    world = FluidPool.with_ready(
        5, lambda t: arrivals[int(t) % len(arrivals)], policy, capacity=capacity, startup_s=startup_s
    )
    world.run(300)
    late = pods = 0
    for _ in range(1200):
        pods += world.step()
        late += world.backlog > 10 * world.ready * capacity
    offered = sum(arrivals) / len(arrivals) / capacity
    assert late < 1200 * 0.05
    assert offered < pods / 1200 < 4 * offered + 2
    assert not any(decision.missing for decision in world.decisions[2 * int(startup_s) :] if len(decision.missing) > 1)
