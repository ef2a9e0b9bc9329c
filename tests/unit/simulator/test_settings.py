from pathlib import Path

import pytest
from pagestream_scaling import PolicyInvalid, ScalingPolicy
from pagestream_simulator.errors import SettingInvalidError, WorkloadInvalidError
from pagestream_simulator.fleet.profile import EngineProfile, StepCost, packaged_profile, read_profile, write_profile
from pagestream_simulator.study.measure import MeasuredStep, fit, residuals, step_seconds
from pagestream_simulator.study.spaces import read_policy, spaces
from pagestream_simulator.terms import Terms, read_terms

COST = StepCost(0.01, 0.0005, 1e-7, 0.0002, 1e-6)


def test_costs_that_made_the_steps_are_found_again() -> None:
    contents = [(p, p * p // 2, d, d * 100) for p in (0, 50, 400) for d in (0, 1, 20, 64) if p or d]
    steps = [MeasuredStep(*content, 0.0) for content in contents]
    exact = [MeasuredStep(*content, step_seconds(COST, step)) for content, step in zip(contents, steps, strict=True)]
    found = fit(exact)
    assert max(abs(step_seconds(found, step) / step.seconds - 1) for step in exact) < 1e-9
    assert residuals(found, exact)["relative_error_p90"] < 1e-9


def test_no_cost_is_below_zero() -> None:
    steps = [MeasuredStep(0, 0, d, d * 50, 0.02 - 0.0001 * d) for d in range(1, 40)]
    found = fit(steps)
    assert found.decode_s == found.decode_context_s == 0
    assert found.fixed_s > 0


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    profile = EngineProfile(COST, kv_blocks=7, source={"model": "m"})
    write_profile(profile, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile
    assert read_profile(packaged_profile()).source["steps"] > 1000


@pytest.mark.parametrize("text", ["", "{}", '{"cost": {}}', '{"cost": {"fixed_s": 1}}'])
def test_what_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(WorkloadInvalidError, match=r"p\.json"):
        read_profile(tmp_path / "p.json")


def test_the_studys_terms_can_be_read_and_wrong_names_are_refused(tmp_path: Path) -> None:
    terms = read_terms(Path(__file__).parents[3] / "docs/benchmarks/autoscaling-terms.toml")
    assert terms.objective == Terms().objective
    assert terms.load.tune.endswith(".csv")
    assert terms.load.report.endswith(".csv")
    assert terms.load.tune != terms.load.report
    (tmp_path / "t.toml").write_text("[objective]\nttft = 1")
    with pytest.raises(WorkloadInvalidError, match="ttft"):
        read_terms(tmp_path / "t.toml")


def test_a_policy_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text('{"max_replicas": 3, "backlog": {"busy": 0.5}}')
    policy = read_policy(path)
    assert (policy.max_replicas, policy.backlog.busy) == (3, 0.5)
    assert policy.panic == ScalingPolicy().panic
    path.write_text('{"backlog": {"bussy": 0.5}}')
    with pytest.raises(SettingInvalidError, match="bussy"):
        read_policy(path)
    path.write_text('{"backlog": {"busy": 5}}')
    with pytest.raises(SettingInvalidError, match="busy"):
        read_policy(path)


def test_every_value_of_a_space_makes_a_law_or_is_refused_for_what_it_contradicts() -> None:
    for space in spaces(Terms()).values():
        assert set(space.default) == set(space.values)
        refused = set()
        for name, values in space.values.items():
            for value in values:
                try:
                    space.make(dict(space.default) | {name: value})
                except PolicyInvalid:
                    refused.add(name)
        assert refused <= {"kv_utilization.target", "kv_utilization.low"}  # low must lie below target
