import pytest
from pagestream_simulator.engine.step_contents import StepContents
from pagestream_simulator.fleet.profile import StepCost
from pagestream_simulator.study.measure import MeasuredStep, fit, residuals

pytestmark = pytest.mark.builds

COST = StepCost(0.01, 0.0005, 1e-7, 0.0002, 1e-6)


def test_fit_recovers_the_costs_of_exact_steps() -> None:
    contents = [StepContents(p, p * p // 2, d, d * 100) for p in (0, 50, 400) for d in (0, 1, 20, 64) if p or d]
    exact = [MeasuredStep(each, each.seconds(COST)) for each in contents]
    found = fit(exact)
    assert max(abs(step.contents.seconds(found) / step.seconds - 1) for step in exact) < 1e-9
    assert residuals(found, exact)["relative_error_p90"] < 1e-9


def test_fit_gives_no_negative_cost() -> None:
    steps = [MeasuredStep(StepContents(0, 0, d, d * 50), 0.02 - 0.0001 * d) for d in range(1, 40)]
    found = fit(steps)
    assert found.decode_s == found.decode_context_s == 0
    assert found.fixed_s > 0
