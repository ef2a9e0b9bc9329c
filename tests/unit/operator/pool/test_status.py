from dataclasses import replace
from typing import Any

from pagestream_operator.api import EnginePoolStatus
from pagestream_operator.kube.pods import Pod
from pagestream_operator.pool.conditions import findings
from pagestream_operator.pool.status import changed, differs, differs_in_substance, pool_status
from pagestream_operator.pool.view import PoolView
from pagestream_scaling import Decision, Limit
from support.kubernetes.pool_objects import deployment_body, pod_body, pool

DECISION = Decision(desired=2, reason="2 do", limiting=Limit.NONE, inputs={"kv": 0.123456, "arrivals": 1e-9})
NOW = 1_767_225_600.0


def status(decision: Decision | None = DECISION, now_s: float = NOW, **more: Any) -> EnginePoolStatus:
    bodies = [pod_body("a"), pod_body("b", ready=False), pod_body("c", ending=True)]
    view = PoolView(deployment_body(2), [Pod.from_object(body) for body in bodies])
    demo = pool()
    return pool_status(
        demo,
        view,
        findings(demo, view, 2, decision, None, now_s=NOW),
        desired=2,
        decision=decision,
        kv_utilization=0.6,
        term=3,
        now_s=now_s,
        **more,
    )


def test_what_is_told() -> None:
    made = status()
    assert (made.replicas, made.ready_replicas, made.draining_replicas, made.desired_replicas) == (2, 1, 1, 2)
    assert made.kv_utilization == "60%"
    assert made.leader_term == 3
    assert made.scaling is not None
    assert made.scaling.time == "2026-01-01T00:00:00Z"
    assert made.scaling.inputs == {"arrivals": 0.0, "kv": 0.123}


def test_an_object_has_no_empty_fields() -> None:
    assert None not in status(None).to_object().values()


def test_numbers_that_move_are_no_substance() -> None:
    moved = status(replace(DECISION, inputs={"kv": 0.2}, reason="2 still do"))
    assert not differs_in_substance(moved, status())
    assert differs(moved, status())


def test_time_alone_is_no_difference() -> None:
    assert not differs(
        status(now_s=NOW + 60), status().model_copy(update={"conditions": status(now_s=NOW + 60).conditions})
    )


def test_another_limit_or_number_is_substance() -> None:
    assert differs_in_substance(status(replace(DECISION, limiting=Limit.PANIC)), status())
    assert differs_in_substance(status(replace(DECISION, desired=3)), status())
    assert differs_in_substance(status().model_copy(update={"leader_term": 4}), status())


def test_transitions_are_told_once() -> None:
    assert {now.type for now, was in changed(status(), EnginePoolStatus())} == {
        "Ready",
        "Progressing",
        "Degraded",
        "ScalingActive",
    }
    assert changed(status(), status()) == []
