import http.client
import socket
import threading
from collections.abc import Callable

import pytest
from pagestream_telemetry.endpoint import Endpoint, Probes
from pagestream_telemetry.errors import EndpointError


def ask(endpoint: Endpoint, method: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=5)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def probes(problem: str = "", unready: str = "", profile: Callable[[int], str] | None = None) -> Probes:
    return Probes(lambda: problem, lambda: unready, lambda: b"metric 1\n", profile)


def test_probes_of_a_working_process_succeed() -> None:
    with Endpoint(probes(), "127.0.0.1", 0) as endpoint:
        assert ask(endpoint, "GET", "/healthz") == (200, "ok\n")
        assert ask(endpoint, "GET", "/readyz") == (200, "ready\n")
        assert ask(endpoint, "GET", "/metrics?x=1") == (200, "metric 1\n")
        assert ask(endpoint, "GET", "/else")[0] == 404


def test_failing_probes_give_the_reason() -> None:
    with Endpoint(probes("stuck", "loading"), "127.0.0.1", 0) as endpoint:
        assert ask(endpoint, "GET", "/healthz") == (503, "stuck\n")
        assert ask(endpoint, "GET", "/readyz") == (503, "loading\n")


def test_a_silent_client_blocks_no_other() -> None:
    with Endpoint(probes(), "127.0.0.1", 0) as endpoint, socket.create_connection(("127.0.0.1", endpoint.port)):
        assert ask(endpoint, "GET", "/healthz")[0] == 200


def test_a_profile_can_be_started_where_it_is_enabled() -> None:
    asked: list[int] = []

    def profile(steps: int) -> str:
        if asked:
            raise RuntimeError("one is under way")
        asked.append(steps)
        return "/there"

    with Endpoint(probes(profile=profile), "127.0.0.1", 0) as endpoint:
        assert ask(endpoint, "POST", "/debug/profile?steps=none")[0] == 400
        assert ask(endpoint, "POST", "/debug/profile?steps=0")[0] == 400
        assert ask(endpoint, "GET", "/debug/profile?steps=3")[0] == 404
        assert ask(endpoint, "POST", "/debug/profile?steps=3") == (202, "/there\n")
        assert ask(endpoint, "POST", "/debug/profile?steps=3") == (409, "one is under way\n")
    assert asked == [3]
    with Endpoint(probes(), "127.0.0.1", 0) as endpoint:
        assert ask(endpoint, "POST", "/debug/profile?steps=3")[0] == 404


def test_a_taken_port_is_an_error_and_a_used_one_is_free_again() -> None:
    with Endpoint(probes(), "127.0.0.1", 0) as endpoint:
        with pytest.raises(EndpointError, match=f"127.0.0.1:{endpoint.port}"):
            Endpoint(probes(), "127.0.0.1", endpoint.port)
        port = endpoint.port
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics endpoint"]
