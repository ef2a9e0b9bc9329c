"""Variables of the environment, and the settings of telemetry."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from pagestream_telemetry import (
    GROUPS,
    TelemetryError,
    TelemetrySettings,
    VariableError,
    read_environment,
    telemetry_settings,
)

FIELDS = {
    "name": str,
    "count": int,
    "share": float,
    "on": bool,
    "place": Path | None,
    "port": int | None,
    "weights": Mapping[str, int],
    "modules": Sequence[str],
}


def read(**variables: str) -> dict[str, dict[str, object]]:
    return read_environment(variables, {"WORKER": FIELDS})


def test_each_type_is_read() -> None:
    given = read(
        PAGESTREAM_WORKER__NAME="",
        PAGESTREAM_WORKER__COUNT="-3",
        PAGESTREAM_WORKER__SHARE="0.5",
        PAGESTREAM_WORKER__ON="False",
        PAGESTREAM_WORKER__PLACE="/place",
        PAGESTREAM_WORKER__PORT="",
        PAGESTREAM_WORKER__WEIGHTS="a=2, b=1",
        PAGESTREAM_WORKER__MODULES="a.b, c,",
    )["WORKER"]
    assert given == {
        "name": "",
        "count": -3,
        "share": 0.5,
        "on": False,
        "place": Path("/place"),
        "port": None,
        "weights": {"a": 2, "b": 1},
        "modules": ("a.b", "c"),
    }


@pytest.mark.parametrize(
    "variable",
    [
        "PAGESTREAM_REQUIRE",
        "PAGESTREAM_IMAGE_LOADER",
        "PAGESTREAM_FAULT_POINTS",
        "PAGESTREAM_GATEWAY_PORT_8000_TCP_ADDR",
        "PAGESTREAM_OPERATOR__NAMESPACES",
        "PAGESTREAM_CLIENT__API_KEY",
        "OTHER__FIELD",
    ],
)
def test_variables_that_are_no_settings_of_this_process_are_ignored(variable: str) -> None:
    assert read(**{variable: "tcp://10.0.0.1:80"}) == {"WORKER": {}}


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("PAGESTREAM_WORKER__COUNTS", "1", "did you mean PAGESTREAM_WORKER__COUNT?"),
        ("PAGESTREAM_WORKER__ELSE", "1", "known in this group: PAGESTREAM_WORKER__NAME"),
        ("PAGESTREAM_WORKER__count", "1", "unknown setting"),
        ("PAGESTREAM_WORKR__COUNT", "1", "did you mean PAGESTREAM_WORKER__...?"),
        ("PAGESTREAM_XYZ__COUNT", "1", "known groups: PAGESTREAM_WORKER__"),
        ("PAGESTREAM_WORKER__COUNT", "1.5", "a whole number is expected"),
        ("PAGESTREAM_WORKER__PORT", "tcp://10.0.0.1:80", "a whole number is expected"),
        ("PAGESTREAM_WORKER__SHARE", "nan", "a finite number is expected"),
        ("PAGESTREAM_WORKER__ON", "yes", "true or false is expected"),
        ("PAGESTREAM_WORKER__WEIGHTS", "a", "a list like"),
        ("PAGESTREAM_WORKER__WEIGHTS", "a=x", "a list like"),
        ("PAGESTREAM_WORKER__COUNT", "", "a whole number is expected"),
    ],
)
def test_an_error_names_the_variable_and_what_is_expected(variable: str, text: str, expected: str) -> None:
    with pytest.raises(VariableError) as caught:
        read(**{variable: text})
    assert str(caught.value).startswith(f"{variable}: ")
    assert expected in str(caught.value)
    assert caught.value.variable == variable
    assert isinstance(caught.value, TelemetryError)


def test_the_groups_of_all_processes_are_known() -> None:
    assert set(GROUPS) >= {"WORKER", "ENGINE", "BROKER", "GATEWAY", "TELEMETRY", "OPERATOR"}


def test_nothing_is_exported_by_default() -> None:
    assert telemetry_settings({}) == TelemetrySettings()
    assert not telemetry_settings({"PAGESTREAM_TELEMETRY__OTLP_ENDPOINT": ""}).exports


def test_flags_win_over_the_environment_and_ours_over_the_standard_one() -> None:
    standard = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://standard:4317"}
    ours = standard | {"PAGESTREAM_TELEMETRY__OTLP_ENDPOINT": "http://ours:4317"}
    assert telemetry_settings(standard).otlp_endpoint == "http://standard:4317"
    assert telemetry_settings(ours).otlp_endpoint == "http://ours:4317"
    assert telemetry_settings(ours, {"otlp_endpoint": "http://flag:4317"}).otlp_endpoint == "http://flag:4317"
    assert telemetry_settings(ours, {"otlp_endpoint": None, "log_level": "DEBUG"}).log_level == "DEBUG"
    assert not telemetry_settings(standard | {"PAGESTREAM_TELEMETRY__OTLP_ENDPOINT": ""}).exports


def test_the_standard_switch_turns_exports_off() -> None:
    environ = {"OTEL_SDK_DISABLED": "true", "PAGESTREAM_TELEMETRY__OTLP_ENDPOINT": "http://ours:4317"}
    assert not telemetry_settings(environ).exports


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("OTLP_ENDPOINT", "collector:4317"),
        ("EXPORT_INTERVAL_S", "0"),
        ("TRACE_SAMPLE_RATIO", "1.5"),
        ("LOG_FORMAT", "xml"),
        ("LOG_LEVEL", "loud"),
        ("TRACES", "maybe"),
        ("NOTHING", "1"),
    ],
)
def test_an_error_names_the_variable(field: str, text: str) -> None:
    with pytest.raises(VariableError, match=f"^PAGESTREAM_TELEMETRY__{field}: "):
        telemetry_settings({f"PAGESTREAM_TELEMETRY__{field}": text})
