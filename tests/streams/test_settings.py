"""Settings of the streams: which values fit each other, and how they are read."""

import subprocess
import sys

import pytest
from pagestream_streams import StreamsSettings, settings_from_environment
from support.processes.waiting import LIMIT_S


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


def test_without_variables_all_values_are_the_defaults() -> None:
    assert settings_from_environment({"PATH": "/bin", "PAGESTREAM_GATEWAY__HOST": "::"}) == StreamsSettings()


def test_variables_of_each_type() -> None:
    settings = settings_from_environment(
        {
            "PAGESTREAM_BROKER__MAX_QUEUED_REQUESTS": "3",
            "PAGESTREAM_BROKER__CONTROL_LEASES": "2.5",
            "PAGESTREAM_BROKER__TENANT_WEIGHTS": "a=2, b=1",
        }
    )
    assert (settings.max_queued_requests, settings.control_leases) == (3, 2.5)
    assert settings.tenant_weights == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PAGESTREAM_BROKER__NOTHING", "1"),
        ("PAGESTREAM_BROKER__LEASE_MS", "soon"),
        ("PAGESTREAM_BROKER__LEASE_MS", "-1"),
        ("PAGESTREAM_BROKER__CONTROL_LEASES", "nan"),
        ("PAGESTREAM_BROKER__TENANT_WEIGHTS", "a"),
        ("PAGESTREAM_BROKER__TENANT_WEIGHTS", "a=x"),
    ],
)
def test_an_error_names_the_variable(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=variable):
        settings_from_environment({variable: text})


def test_values_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="lease_ms"):
        settings_from_environment({"PAGESTREAM_BROKER__LEASE_MS": "1000"})


@pytest.mark.parametrize("prefix", ["", "a:b", "a{b}", "a b", "x" * 129])
def test_a_key_prefix_that_another_part_of_a_key_could_hold_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"PAGESTREAM_BROKER__\*: key_prefix: expected 1 to 128"):
        settings_from_environment({"PAGESTREAM_BROKER__KEY_PREFIX": prefix})


def test_constants_of_the_protocol_need_no_redis_client() -> None:
    code = "import sys, pagestream_streams.protocol.keys; print('redis' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True
    ).stdout
    assert said == "False\n"
