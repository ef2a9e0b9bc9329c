from pagestream_worker.health import Health


def test_a_loading_worker_is_alive_and_not_ready() -> None:
    health = Health(stall_timeout_s=1.0)
    assert health.problem() == ""
    assert "loaded" in health.unreadiness()


def test_a_serving_worker_is_ready_until_it_drains() -> None:
    health = Health(stall_timeout_s=1.0)
    health.serve(lambda: 0.0)
    assert (health.problem(), health.unreadiness(), health.is_draining) == ("", "", False)
    health.drain()
    assert health.problem() == ""
    assert "ending" in health.unreadiness()
    assert health.is_draining


def test_a_step_without_an_end_is_a_problem() -> None:
    age = [0.5]
    health = Health(stall_timeout_s=1.0)
    health.serve(lambda: age[0])
    assert health.problem() == ""
    age[0] = 1.5
    assert "step" in health.problem()
    assert health.unreadiness() == health.problem()


def test_a_watchdog_without_a_heartbeat_is_a_problem() -> None:
    health = Health(stall_timeout_s=0.0)
    health.serve(lambda: 0.0)
    assert "event loop" in health.problem()
