import pytest
from pagestream_telemetry.errors import VariableError
from pagestream_worker.ladder.settings import DegradationSettings, degradation_settings


def test_defaults_and_variables() -> None:
    assert degradation_settings({}) == DegradationSettings()
    assert degradation_settings({"PAGESTREAM_DEGRADATION__REDIS_HIGH": "0.97"}).redis_high == 0.97


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("REDIS_LOW", "0.9", "below redis_high, 0.9"),
        ("CLIMB_S", "1.5", "at least twice period_s, 1.0"),
        ("PERIOD_S", "0", "above 0"),
        ("DISK_HIGH", "1", "unknown setting"),
    ],
)
def test_refusals_name_the_variable(name: str, value: str, message: str) -> None:
    variable = f"PAGESTREAM_DEGRADATION__{name}"
    with pytest.raises(VariableError, match=message) as caught:
        degradation_settings({variable: value})
    assert variable in str(caught.value)
