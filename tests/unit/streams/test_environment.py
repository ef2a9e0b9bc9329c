import pytest
from pagestream_streams import StreamsSettings, settings_from_environment


def test_nothing_given_is_the_defaults() -> None:
    assert settings_from_environment({"PATH": "/bin", "PAGESTREAM_LISTEN__HOST": "::"}) == StreamsSettings()


def test_each_kind_of_field() -> None:
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
def test_what_is_wrong_is_named(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=variable):
        settings_from_environment({variable: text})


def test_values_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="lease_ms"):
        settings_from_environment({"PAGESTREAM_BROKER__LEASE_MS": "1000"})
