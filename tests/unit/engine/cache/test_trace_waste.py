from pathlib import Path

import pytest
from pagestream_simulator.traces.files import read_trace
from support import traces
from support.engines.trace_waste import at_load, saturated, waste

LIMIT = 0.01


@pytest.mark.parametrize("name", ["azure_llm_2023_conv_300", "azure_llm_2023_code_300"])
def test_blocks_of_16_waste_at_most_a_hundredth_of_what_they_hold(name: str) -> None:
    rows = read_trace(str(Path(traces.__path__[0]) / f"{name}.csv"))
    full, capacity_s = waste(saturated(rows), 16)
    loaded, _ = waste(at_load(rows, capacity_s), 16)
    assert 0 < full <= LIMIT
    assert 0 < loaded <= LIMIT
    assert waste(saturated(rows), 128)[0] > LIMIT, "larger blocks waste more than is allowed: it is really counted"
