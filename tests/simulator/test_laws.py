from collections.abc import Sequence

import pytest
from pagestream_scaling import PodObservation, PodSample, PodState, PoolObservation, QueueSample
from pagestream_simulator import FixedLaw, HpaBehavior, HpaLaw, HpaSettings, KedaLaw, KedaSettings, PlannedLaw

pytestmark = pytest.mark.builds


def observed(
    now_s: float, used: Sequence[float | None], *, starting: int = 0, depth: float = 0.0, running: float = 0.0
) -> PoolObservation:
    """Return an observation of ready pods with these KV utilizations (None: no sample), and of starting ones."""
    pods = [
        PodObservation(
            f"ready-{number}",
            PodState.READY,
            0.0,
            0.0,
            None if value is None else PodSample(now_s, value, 1.0, 0.0),
        )
        for number, value in enumerate(used)
    ]
    pods += [PodObservation(f"starting-{number}", PodState.STARTING, now_s) for number in range(starting)]
    queue = QueueSample(now_s, depth, 100 * depth, 0.0, running)
    return PoolObservation(now_s, len(pods), tuple(pods), queue)


@pytest.mark.parametrize(
    ("used", "starting", "wanted"),
    [
        ((0.8, 0.8), 0, 2),  # on target
        ((0.87, 0.87), 0, 2),  # within the tolerance of 0.1
        ((0.9, 0.9), 0, 3),  # 1.125 * 2, rounded up
        ((0.4, 0.4, 0.4, 0.4), 0, 2),
        ((1.0, 1.0), 1, 3),  # the starting one counts as 0: 2.0 / 3 / 0.8 is below 1, so nothing changes
        ((1.0, 1.0, 1.0, 1.0), 1, 5),  # 4.0 / 5 / 0.8 is 1.0: the one that starts is enough
        ((0.4, None), 0, 2),  # the one without a sample counts as on target: 0.6 / 0.8 of 2, rounded up
        ((None, None), 0, 2),
    ],
)
def test_hpa_recommends_as_kubernetes_does(used: Sequence[float | None], starting: int, wanted: int) -> None:
    assert HpaLaw(HpaSettings()).recommended(observed(0.0, used, starting=starting)) == wanted


def test_hpa_keeps_pods_during_its_stabilization_window() -> None:
    law = HpaLaw(HpaSettings())
    assert law.desired(observed(0.0, [0.8] * 4)) == 4
    for now_s in range(15, 301, 15):
        assert law.desired(observed(float(now_s), [0.2] * 4)) == 4
    assert law.desired(observed(315.0, [0.2] * 4)) == 1


def test_hpa_doubles_or_adds_four_in_fifteen_seconds() -> None:
    settings = HpaSettings(target=0.01)
    assert HpaLaw(settings).desired(observed(0.0, [1.0] * 2)) == 6
    assert HpaLaw(settings).desired(observed(0.0, [1.0] * 10)) == 20
    law = HpaLaw(settings)
    assert law.limited(100, 2, 0.0) == 6
    assert law.limited(100, 6, 5.0) == 6
    assert law.limited(100, 6, 20.0) == 12


def test_hpa_removes_a_percentage_per_period() -> None:
    law = HpaLaw(HpaSettings(down=HpaBehavior(0.0, 10.0, 0, 60.0)))
    assert law.limited(1, 20, 0.0) == 18
    assert law.limited(1, 18, 30.0) == 18
    assert law.limited(1, 18, 61.0) == 16


def test_keda_scales_by_the_queue_and_wakes_from_zero_when_it_polls() -> None:
    law = KedaLaw(KedaSettings(hpa=HpaSettings(min_replicas=0), requests_each=5.0, cooldown_s=60.0))
    assert law.desired(observed(0.0, [0.1], depth=20)) == 4
    assert (
        KedaLaw(KedaSettings(requests_each=5.0, counts_running=True)).desired(observed(0.0, [0.1], depth=5, running=10))
        == 3
    )
    zero = KedaLaw(KedaSettings(hpa=HpaSettings(min_replicas=0), polling_s=30.0))
    assert zero.desired(observed(0.0, [])) in {0, 1}  # KEDA polls once at the start
    assert zero.desired(observed(15.0, [], depth=3)) == 0
    assert zero.desired(observed(30.0, [], depth=3)) == 1


def test_keda_goes_to_zero_after_the_cooldown() -> None:
    law = KedaLaw(KedaSettings(hpa=HpaSettings(min_replicas=0), polling_s=30.0, cooldown_s=60.0))
    assert law.desired(observed(0.0, [0.5], depth=3)) == 1
    assert law.desired(observed(45.0, [0.0])) == 1
    assert law.desired(observed(75.0, [0.0])) == 0


def test_plans_and_fixed_fleets() -> None:
    plan = PlannedLaw((0.0, 10.0, 20.0), (2, 5, 1))
    assert [plan.planned(at) for at in (0.0, 9.9, 10.0, 25.0)] == [2, 2, 5, 1]
    assert plan.initial(7) == 2
    assert FixedLaw(3).initial(7) == FixedLaw(3).planned(5.0) == 3
