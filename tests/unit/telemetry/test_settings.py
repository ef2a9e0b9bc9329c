import pytest
from pagestream_telemetry.errors import VariableError
from pagestream_telemetry.settings import TelemetrySettings, telemetry_settings


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
