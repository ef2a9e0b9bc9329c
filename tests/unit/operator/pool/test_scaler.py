from pagestream_operator.pool.scaler import mean_utilization
from pagestream_scaling import PodObservation, PodSample, PodState, PoolObservation, SamplesPolicy

NOW = 1_767_225_600.0


def pod(
    name: str, share: float, *, age_s: float = 1, state: PodState = PodState.READY, drains: bool = False
) -> PodObservation:
    return PodObservation(name, state, 0.0, 1.0, PodSample(NOW - age_s, share, 1, 0, draining=drains))


def mean_of(*pods: PodObservation) -> float | None:
    return mean_utilization(PoolObservation(NOW, len(pods), pods), SamplesPolicy())


def test_the_column_is_the_mean_of_ready_pods() -> None:
    assert mean_of(pod("a", 0.5), pod("b", 0.7)) == 0.6


def test_stale_absurd_and_draining_samples_are_no_part_of_it() -> None:
    others = (
        pod("old", 0.9, age_s=3600),
        pod("absurd", 7.0),
        pod("ending", 0.1, state=PodState.DRAINING),
        pod("draining", 0.1, drains=True),
        pod("starting", 0.1, state=PodState.STARTING),
    )
    assert mean_of(*others) is None
    assert mean_of(pod("a", 0.5), *others) == 0.5
