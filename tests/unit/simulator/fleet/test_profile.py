from pathlib import Path

import pytest
from pagestream_simulator.errors import InputFileInvalidError
from pagestream_simulator.fleet.profile import EngineProfile, StepCost, packaged_profile, read_profile, write_profile

COST = StepCost(0.01, 0.0005, 1e-7, 0.0002, 1e-6)


def test_a_profile_round_trips_through_json(tmp_path: Path) -> None:
    profile = EngineProfile(COST, kv_blocks=7, source={"model": "m"})
    write_profile(profile, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == profile
    assert read_profile(packaged_profile()).source["steps"] > 1000


@pytest.mark.parametrize("text", ["", "{}", '{"cost": {}}', '{"cost": {"fixed_s": 1}}'])
def test_a_malformed_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InputFileInvalidError, match=r"p\.json"):
        read_profile(tmp_path / "p.json")
