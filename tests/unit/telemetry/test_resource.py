from pagestream_telemetry.resource import resource_attributes


def test_who_a_process_is_wins_over_what_the_environment_says() -> None:
    environ = {
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=other,k8s.pod.name=demo-1, pagestream.pool = a%20b ,nonsense,=x",
    }
    attributes = resource_attributes("pagestream-engine", "engine-1", environ)
    assert attributes.pop("service.version")
    assert attributes == {
        "service.name": "pagestream-engine",
        "service.instance.id": "engine-1",
        "k8s.pod.name": "demo-1",
        "pagestream.pool": "a b",
    }
