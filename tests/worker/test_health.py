import pytest
from pagestream_worker import Health


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time on time.monotonic(), to be set."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def beat(health: Health, now: list[float], after_s: float = 1.0) -> None:
    now[0] += after_s
    health.beat()


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


def test_a_step_without_an_end_is_a_problem(now: list[float]) -> None:
    since = now[0]
    health = Health(stall_timeout_s=10.0)
    health.serve(lambda: now[0] - since)
    for _ in range(10):
        beat(health, now)
        assert health.problem() == ""
    beat(health, now)
    assert health.problem() == "a step has run for 11 s"
    assert health.unreadiness() == health.problem()


def test_a_report_ends_what_was_counted(now: list[float]) -> None:
    since = now[0]
    health = Health(stall_timeout_s=10.0)
    health.serve(lambda: now[0] - since)
    for _ in range(8):
        beat(health, now)
    since = now[0] + 0.5
    for _ in range(8):
        beat(health, now)
    assert health.stalled_s == 7.5
    since = now[0] + 0.5
    beat(health, now, after_s=60.0)  # the process was stopped after the report
    assert health.stalled_s == 2.0


def test_a_stop_of_the_whole_process_is_no_stall_of_its_engine(now: list[float]) -> None:
    since = now[0]
    health = Health(stall_timeout_s=10.0)
    health.serve(lambda: now[0] - since)
    beat(health, now)
    beat(health, now, after_s=600.0)
    assert (health.stalled_s, health.problem()) == (3.0, "")
    for _ in range(8):
        beat(health, now)
    assert "11 s" in health.problem(), "it hangs indeed"


def test_a_watchdog_without_a_heartbeat_is_a_problem() -> None:
    health = Health(stall_timeout_s=0.0)
    health.serve(lambda: 0.0)
    assert "event loop" in health.problem()
