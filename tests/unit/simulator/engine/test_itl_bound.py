"""What the bound on inter-token latency keeps where steps take what was measured, without a machine's noise."""

import numpy as np
import pytest
from support.engines.measured_steps import DECODES_S, MeasuredMachine, run_beside_streams


@pytest.mark.parametrize("num_ahead", [0, 1])
def test_steps_beside_long_prompts_take_the_bound_and_hardly_more(num_ahead: int) -> None:
    """With costs that are linear in nothing, for a first long prompt, and for one after it."""
    machine, bound_s = MeasuredMachine(), 2 * DECODES_S
    run_beside_streams(machine, bound_s, [1.0, 90.0], num_ahead)
    arrivals = list(machine.arrivals())
    assert len(arrivals) == 2
    for steps in arrivals:
        times = [seconds / bound_s for context, _, seconds in steps if context >= 0]
        assert len(times) > 400
        assert np.mean(times) > 0.85
        assert np.percentile(times, 99) <= 1.1
        assert max(times) <= 1.3
