import pytest
from pagestream_streams import StreamsSettings


def test_defaults_agree_with_each_other() -> None:
    assert StreamsSettings() == StreamsSettings()


@pytest.mark.parametrize("values", [{"lease_ms": 2000}, {"heartbeat_ms": 1500}, {"sweep_gap_ms": 2600}])
def test_a_lease_that_an_outage_could_end_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="lease_ms"):
        StreamsSettings(**values)


def test_a_gap_shorter_than_the_sweeps_is_refused() -> None:
    with pytest.raises(ValueError, match="sweep_gap_ms"):
        StreamsSettings(sweep_ms=2000)
