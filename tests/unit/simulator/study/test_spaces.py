from pathlib import Path

import pytest
from pagestream_scaling import PolicyInvalid, ScalingPolicy
from pagestream_simulator.errors import SettingInvalidError
from pagestream_simulator.study.spaces import read_policy, spaces
from pagestream_simulator.terms import Terms


def test_a_policy_file_changes_only_what_it_names(tmp_path: Path) -> None:
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


def test_every_value_of_a_space_makes_a_law_or_is_refused() -> None:
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
