import json
import math

import pytest
from pagestream_scaling import MemoryInvalid, ScalingMemory, ScalingPolicy
from support.scaling.worlds import FluidPool


def used_memory() -> ScalingMemory:
    world = FluidPool.with_ready(2, lambda t: 1500 + 20 * t, ScalingPolicy(max_replicas=20))
    world.run(60)
    return world.memory


def test_what_is_written_is_read_back() -> None:
    memory = used_memory()
    assert memory.arrivals
    assert memory.startups
    assert ScalingMemory.from_json(memory.to_json()) == memory
    assert ScalingMemory.from_json(ScalingMemory().to_json()) == ScalingMemory()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"format":1}',
        "nonsense",
        json.dumps({"format": 99}),
        ScalingMemory().to_json().replace('"format":1', '"format":2'),
        ScalingMemory().to_json().replace('"time_s":null', '"time_s":"noon"'),
        ScalingMemory(time_s=math.nan).to_json(),
        ScalingMemory().to_json().replace('"arrivals":[]', '"arrivals":[1]'),
        ScalingMemory().to_json().replace('"arrivals":[]', '"arrivals":[[1,"x"]]'),
        ScalingMemory().to_json().replace('"needs":[]', '"needs":null'),
        ScalingMemory().to_json().replace('"lost":[]', '"lost":[1]'),
    ],
)
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(MemoryInvalid, match=r"start with a fresh one|instead of"):
        ScalingMemory.from_json(text)
