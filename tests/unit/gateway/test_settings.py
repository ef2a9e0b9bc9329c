from pathlib import Path

import pytest
from pagestream_gateway.errors import SettingsError
from pagestream_gateway.settings import Settings, load_settings


def test_defaults() -> None:
    assert load_settings([], {}) == Settings()


def test_flags_win_over_the_environment() -> None:
    environ = {
        "PAGESTREAM_LISTEN__HTTP_PORT": "1",
        "PAGESTREAM_LISTEN__METRICS_PORT": "2",
        "PAGESTREAM_STREAM__KEEP_ALIVE_S": "0.5",
        "PAGESTREAM_AUTH__API_KEYS": "/keys",
        "PAGESTREAM_GATEWAY__ID": "g",
    }
    settings = load_settings(["--http-port", "3", "--gateway-id", "h"], environ)
    assert (settings.listen.http_port, settings.listen.metrics_port, settings.listen.grpc_port) == (3, 2, 50051)
    assert settings.stream.keep_alive_s == 0.5
    assert settings.auth.api_keys == Path("/keys")
    assert settings.gateway.id == "h"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PAGESTREAM_LISTEN__HTTP_PORT", "tcp://10.0.0.1:80"),
        ("PAGESTREAM_LISTEN__PORT", "80"),
        ("PAGESTREAM_STREAM__KEEP_ALIVE_S", "soon"),
        ("PAGESTREAM_LIMIT__MAX_N", "5"),
    ],
)
def test_unknown_and_malformed_variables_are_named(variable: str, value: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        load_settings([], {variable: value})


@pytest.mark.parametrize(
    ("variable", "value", "field"),
    [
        ("PAGESTREAM_LISTEN__GRPC_PORT", "70000", "grpc_port"),
        ("PAGESTREAM_STREAM__KEEP_ALIVE_S", "nan", "keep_alive_s"),
        ("PAGESTREAM_SHUTDOWN__DRAIN_S", "-1", "drain_s"),
        ("PAGESTREAM_LIMITS__MAX_N", "0", "max_n"),
        ("PAGESTREAM_REDIS__URL", "localhost:6379", "redis.url"),
        ("PAGESTREAM_LOG__LEVEL", "LOUD", "log.level"),
    ],
)
def test_values_out_of_range_are_named(variable: str, value: str, field: str) -> None:
    with pytest.raises(SettingsError, match=field):
        load_settings([], {variable: value})


def test_other_processes_variables_are_theirs() -> None:
    assert load_settings([], {"PAGESTREAM_SCHEDULER__MAX_NUM_SEQS": "x", "PAGESTREAM_REQUIRE": "gpu"}) == Settings()
