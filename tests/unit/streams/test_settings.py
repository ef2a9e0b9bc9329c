import pytest
from pagestream_streams import StreamsSettings


def test_defaults_agree_with_each_other() -> None:
    assert StreamsSettings() == StreamsSettings()


@pytest.mark.parametrize("values", [{"lease_ms": 1400}, {"heartbeat_ms": 400}, {"sweep_gap_ms": 1300}])
def test_a_lease_that_an_outage_could_end_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="lease_ms"):
        StreamsSettings(**values)


def test_a_gap_shorter_than_the_sweeps_is_refused() -> None:
    with pytest.raises(ValueError, match="sweep_gap_ms"):
        StreamsSettings(sweep_ms=2000)


def test_a_control_time_in_which_no_lease_could_lapse_is_refused() -> None:
    with pytest.raises(ValueError, match="control_leases"):
        StreamsSettings(control_leases=1.1)


@pytest.mark.parametrize("percent", [0, 101])
def test_a_tenant_s_part_is_between_one_and_all(percent: int) -> None:
    with pytest.raises(ValueError, match="tenant_alone_percent"):
        StreamsSettings(tenant_alone_percent=percent)


def test_a_weight_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="tenant_weights"):
        StreamsSettings(tenant_weights={"a": 2, "b": 0})
