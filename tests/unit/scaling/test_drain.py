import math
from dataclasses import replace

from pagestream_scaling import PodObservation, PodState, drain_order
from support.scaling.worlds import NOW, ready_pod, sample, starting_pod


def names(*pods: PodObservation) -> list[str]:
    return [pod.name for pod in drain_order(pods)]


def test_the_cheapest_goes_first() -> None:
    full = ready_pod("full", sample(utilization=0.9, running=2))
    light = ready_pod("light", sample(utilization=0.1, running=9))
    lighter = ready_pod("lighter", sample(utilization=0.1, running=1))
    assert names(full, light, lighter) == ["lighter", "light", "full"]


def test_pods_that_serve_nobody_yet_go_before_all_and_the_youngest_of_them_first() -> None:
    empty = ready_pod("empty", sample(utilization=0.0, running=0))
    assert names(empty, starting_pod("older", age_s=9), starting_pod("newer", age_s=1)) == ["newer", "older", "empty"]


def test_a_pod_that_was_ready_and_is_not_now_may_hold_streams() -> None:
    hurt = replace(ready_pod("hurt", sample(utilization=0.8)), state=PodState.STARTING)
    assert names(hurt, ready_pod("fine", sample(utilization=0.2))) == ["fine", "hurt"]


def test_what_is_unknown_counts_as_full() -> None:
    unknown, absurd = ready_pod("unknown", None), ready_pod("absurd", sample(utilization=math.nan))
    assert names(unknown, absurd, ready_pod("full", sample(utilization=1.0)))[0] == "full"


def test_equal_pods_have_one_order() -> None:
    older = ready_pod("a", sample(NOW), age_s=700)
    younger = ready_pod("b", sample(NOW), age_s=600)
    assert names(older, younger) == names(younger, older) == ["b", "a"]
