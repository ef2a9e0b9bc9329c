"""Pools of one served name divide its queue by what their pods can do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_operator.kube import PoolKey
from pagestream_operator.pool import Shares
from pagestream_scaling import (
    PodObservation,
    PodSample,
    PodState,
    PoolObservation,
    QueueSample,
    ScalingMemory,
    ScalingPolicy,
    decide,
)
from pagestream_scaling.workload import work_capacity

NOW = 1_700_000_000.0
STARTUP_S = 20.0
OLD, NEW = PoolKey("models", "old"), PoolKey("models", "new")


def test_a_pool_alone_has_the_whole_queue_and_one_without_pods_nothing() -> None:
    shares = Shares()
    assert shares.share(OLD, "demo", NOW) == 1
    shares.report(OLD, "demo", pods=3, each=None, now_s=NOW)
    assert (shares.share(OLD, "demo", NOW), shares.share(NEW, "demo", NOW)) == (1, 0)
    shares.report(NEW, "demo", pods=0, each=None, now_s=NOW)
    assert (shares.share(OLD, "demo", NOW), shares.share(NEW, "demo", NOW)) == (1, 0)
    shares.report(NEW, "demo", pods=1, each=None, now_s=NOW)
    assert (shares.share(OLD, "demo", NOW), shares.share(NEW, "demo", NOW)) == (0.75, 0.25)
    assert shares.share(PoolKey("models", "other"), "other", NOW) == 1
    assert shares.share(OLD, "demo", NOW + 60) == 1, "the other was not heard of for a minute"


def test_pools_without_pods_divide_equally_so_that_one_request_wakes_them() -> None:
    shares = Shares()
    for key in (OLD, NEW):
        shares.report(key, "demo", pods=0, each=500.0, now_s=NOW)
    assert shares.share(OLD, "demo", NOW) == shares.share(NEW, "demo", NOW) == 0.5


def test_a_pool_at_zero_helps_one_that_may_not_grow() -> None:
    shares = Shares()
    shares.report(OLD, "demo", pods=3, each=500.0, now_s=NOW, is_at_limit=True)
    shares.report(NEW, "demo", pods=0, each=None, now_s=NOW)
    assert (shares.share(OLD, "demo", NOW), shares.share(NEW, "demo", NOW)) == (0.75, 0.25)
    shares.report(OLD, "demo", pods=3, each=500.0, now_s=NOW)
    assert shares.share(NEW, "demo", NOW) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.none() | st.floats(1, 1e5)), min_size=1, max_size=6))
def test_shares_add_up_to_one(pools: list[tuple[int, float | None]]) -> None:
    shares = Shares()
    for index, (pods, each) in enumerate(pools):
        shares.report(PoolKey("models", str(index)), "demo", pods=pods, each=each, now_s=NOW)
    found = [shares.share(PoolKey("models", str(index)), "demo", NOW) for index in range(len(pools))]
    assert sum(found) == pytest.approx(1)


@dataclass
class Pool:
    """A pool whose pods do `capacity` prompt tokens a second each."""

    key: PoolKey
    count: int
    capacity: float
    policy: ScalingPolicy
    memory: ScalingMemory = field(default_factory=ScalingMemory)
    created: list[float] = field(default_factory=list)
    most: int = 0

    def __post_init__(self) -> None:
        self.created = [-1000.0] * self.count

    def ready(self, time_s: float) -> int:
        return sum(time_s - created >= STARTUP_S for created in self.created)

    def decide(self, time_s: float, queue: QueueSample, use: float, shares: Shares) -> None:
        sample = PodSample(queue.time_s, use, 8 * use, 0, use * self.capacity, 0.0)
        pods = tuple(
            PodObservation(
                f"{self.key.name}-{index}-{created}", PodState.READY, NOW + created, NOW + created + STARTUP_S, sample
            )
            if time_s - created >= STARTUP_S
            else PodObservation(f"{self.key.name}-{index}-{created}", PodState.STARTING, NOW + created)
            for index, created in enumerate(self.created)
        )
        share = shares.share(self.key, "demo", NOW + time_s)
        seen = PoolObservation(NOW + time_s, len(self.created), pods, queue, share=share)
        decision, self.memory = decide(self.policy, seen, self.memory)
        each = work_capacity(self.memory, self.policy.backlog)
        there = int(decision.inputs["ready"] + decision.inputs["starting"])
        shares.report(self.key, "demo", pods=there, each=each, now_s=NOW + time_s)
        self.created = self.created[: decision.desired]
        self.created += [time_s] * (decision.desired - len(self.created))
        self.most = max(self.most, len(self.created))


def serve(pools: list[Pool], offered: float, seconds: int = 500) -> None:
    """Requests of 500 tokens, `offered` tokens a second of them, over all pods in proportion to what they can do."""
    shares, backlog, queue, use = Shares(), 0.0, QueueSample(NOW, 0, 0, 0, 0, 0), 0.0
    for second in range(seconds):
        able = sum(pool.ready(second) * pool.capacity for pool in pools)
        served = min(backlog + offered, able)
        backlog += offered - served
        if second % 2 == 0:
            use = served / able if able else 0.0
            age_s = backlog / served if served else 0.0
            queue = QueueSample(NOW + second, backlog / 500, backlog, age_s, served / 250, served)
        for pool in pools:
            pool.decide(float(second), queue, use, shares)


def test_a_canary_beside_a_pool_adds_no_second_fleet() -> None:
    """Both saw the whole queue before: 32 pods in place of 16, and a canary at zero was woken by the other's load."""
    policy = ScalingPolicy(min_replicas=1, max_replicas=40)
    old = Pool(OLD, 4, 1000.0, policy)
    canary = Pool(NEW, 0, 1000.0, replace(policy, min_replicas=0))
    serve([old, canary], offered=3000.0)
    assert (len(old.created), canary.most) == (4, 0)
    one, other = Pool(OLD, 4, 1000.0, policy), Pool(NEW, 4, 1000.0, policy)
    serve([one, other], offered=12_000.0)
    assert 15 <= len(one.created) + len(other.created) <= 18


def test_pools_of_different_machines_share_by_what_their_pods_do() -> None:
    policy = ScalingPolicy(min_replicas=1, max_replicas=40)
    fast, slow = Pool(OLD, 2, 4000.0, policy), Pool(NEW, 4, 1000.0, policy)
    serve([fast, slow], offered=18_000.0)
    able = 4000 * len(fast.created) + 1000 * len(slow.created)
    assert 18_000 <= able <= 1.7 * 18_000
