import subprocess
import sys

from pagestream_telemetry import catalog
from pagestream_telemetry.context import NO_TRACE, TraceContext
from pagestream_telemetry.process import resource_attributes, running_telemetry, silent_telemetry
from pagestream_telemetry.settings import TelemetrySettings
from pagestream_telemetry.spans import NO_TRACER

PARENT = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01", "vendor=1")


def test_without_an_endpoint_nothing_is_loaded_and_everything_is_counted() -> None:
    with running_telemetry(TelemetrySettings(), service="s", instance_id="i", environ={}) as telemetry:
        assert telemetry.tracer is NO_TRACER
        telemetry.registry.number(catalog.STREAMS_OPEN).series().set(2)
        text = telemetry.render().decode()
    assert "pagestream_streams_open 2.0" in text
    assert 'target_info{service_instance_id="i",service_name="s"' in text


def test_spans_that_are_not_kept_hand_the_callers_trace_on() -> None:
    span = silent_telemetry().tracer.start("any", PARENT)
    span.set({"a": 1})
    span.event("b")
    span.fail("c")
    span.end()
    assert span.context == PARENT
    assert silent_telemetry().tracer.start("any", NO_TRACE).context == NO_TRACE


def test_processes_that_export_nothing_never_load_an_exporter() -> None:
    """The API is there all the same where it is installed: redis-py imports it."""
    program = (
        "import sys, pagestream_gateway.__main__, pagestream_worker.__main__\n"
        "never = 'opentelemetry.exporter', 'pagestream_telemetry.otlp'\n"
        "print(*sorted(name for name in sys.modules if name.startswith(never)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == ""


def test_a_process_own_attributes_override_those_of_the_environment() -> None:
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
