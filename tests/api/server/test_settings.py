from pathlib import Path

import pytest
from pagestream_gateway import Settings, SettingsError, load_settings


def test_defaults() -> None:
    assert load_settings([], {}) == Settings()


def test_flags_win_over_the_environment() -> None:
    environ = {
        "PAGESTREAM_GATEWAY__HTTP_PORT": "1",
        "PAGESTREAM_GATEWAY__METRICS_PORT": "2",
        "PAGESTREAM_STREAM__KEEP_ALIVE_S": "0.5",
        "PAGESTREAM_GATEWAY__API_KEYS": "/keys",
        "PAGESTREAM_GATEWAY__REDIS": "redis://there",
        "PAGESTREAM_GATEWAY__ID": "g",
        "PAGESTREAM_BROKER__RETENTION_S": "60",
        "PAGESTREAM_TELEMETRY__OTLP_ENDPOINT": "http://here:4317",
    }
    settings = load_settings(["--http-port", "3", "--gateway-id", "h"], environ)
    gateway = settings.gateway
    assert (gateway.http_port, gateway.metrics_port, gateway.grpc_port) == (3, 2, 50051)
    assert (gateway.id, gateway.redis, gateway.api_keys) == ("h", "redis://there", Path("/keys"))
    assert settings.stream.keep_alive_s == 0.5
    assert settings.broker.retention_s == 60
    assert settings.telemetry.otlp_endpoint == "http://here:4317"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PAGESTREAM_GATEWAY__HTTP_PORT", "tcp://10.0.0.1:80"),
        ("PAGESTREAM_GATEWAY__PORT", "80"),
        ("PAGESTREAM_STREAM__KEEP_ALIVE_S", "soon"),
        ("PAGESTREAM_STREAM__KEEP_ALIVE_S", "nan"),
        ("PAGESTREAM_LIMIT__MAX_N", "5"),
        ("PAGESTREAM_TELEMETRY__NOTHING", "5"),
        ("PAGESTREAM_BROKER__NOTHING", "5"),
        ("PAGESTREAM_TELEMETRY__LOG_LEVEL", "LOUD"),
    ],
)
def test_unknown_and_malformed_variables_are_named(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        load_settings([], {variable: value})


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [
        ("PAGESTREAM_GATEWAY__GRPC_PORT", "70000", "grpc_port"),
        ("PAGESTREAM_GATEWAY__ANSWER_LIMIT_S", "0", "answer_limit_s"),
        ("PAGESTREAM_SHUTDOWN__DRAIN_S", "-1", "drain_s"),
        ("PAGESTREAM_LIMITS__MAX_N", "0", "max_n"),
        ("PAGESTREAM_STREAM__WHOLE_ANSWER_BLANKS_AFTER_S", "0", "whole_answer_blanks_after_s"),
        ("PAGESTREAM_GATEWAY__REDIS", "localhost:6379", "gateway.redis"),
        ("PAGESTREAM_FORMATS__TOOL_CALL_PARSER_OF", "a/m=hermes,n=herms", r"'n'.*'herms' was given, one of .*hermes"),
        ("PAGESTREAM_FORMATS__REASONING_PARSER_OF", "m=think", r"reasoning_parser_of\['m'\]"),
        ("PAGESTREAM_GATEWAY__UNKNOWN_FIELDS", "drop", "unknown_fields: expected 'refuse' or 'ignore', got 'drop'"),
        ("PAGESTREAM_GATEWAY__ALLOWED_HOSTS", "a.example, https://b.example:80", "allowed_hosts: 'https://b"),
    ],
)
def test_values_out_of_range_are_named(variable: str, value: str, field: str) -> None:
    with pytest.raises(SettingsError, match=field):
        load_settings([], {variable: value})


def test_other_processes_variables_are_theirs() -> None:
    assert load_settings([], {"PAGESTREAM_ENGINE__MAX_NUM_SEQS": "x", "PAGESTREAM_REQUIRE": "gpu"}) == Settings()
