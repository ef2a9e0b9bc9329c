"""What the operator keeps of exported metrics, and what it makes of several models' metrics."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    DataPointFlags,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Metric,
    ResourceMetrics,
)
from pagestream_operator.metrics import (
    Intake,
    MetricsStore,
    PodRef,
    PoolMetrics,
    SteadyClock,
    StoreSettings,
    share_of_all,
    total_latencies,
    total_queue,
)
from pagestream_scaling import ClassSample, LatencyWindow, PodSample, QueueSample
from support.telemetry.otlp_messages import (
    CUMULATIVE,
    DELTA,
    UNSPECIFIED,
    engine,
    gateway,
    gauge,
    histogram,
    resource,
    total,
)

# -- What the store makes of exports: as they should come, and as they do come


START = 1_000_000.0
TTFT = "gen_ai.server.time_to_first_token"
PROMPT = "pagestream.tokens.prompt"
BOUNDS = (0.5, 1.0, 2.0)


@dataclass
class Listener:
    """A store with a clock that tests set."""

    now: float = START
    settings: StoreSettings = field(default_factory=StoreSettings)
    release: str = ""

    def __post_init__(self) -> None:
        self.store = MetricsStore(self.settings, release=self.release, clock=lambda: self.now)

    def take(self, *resources: ResourceMetrics) -> Intake:
        intake = Intake(self.store)
        for each in resources:
            intake.store(each)
        return intake

    def observe(self, *pods: str | PodRef, namespace: str = "ns", model: str = "demo") -> PoolMetrics:
        return self.store.observe(namespace=namespace, pool="demo", model=model, pods=pods or ("pod-0",))

    def sample(self, *pods: str | PodRef) -> PodSample:
        (sample,) = self.observe(*pods).samples.values()
        return sample

    def rate(self) -> float | None:
        return self.sample().prompt_tokens_per_s

    def ttft(self) -> tuple[float, ...]:
        window = self.observe().ttft
        assert window is not None
        return window.counts


@pytest.fixture
def listener() -> Listener:
    return Listener()


# -- pods


def test_a_pod_s_newest_gauges_are_its_sample(listener: Listener) -> None:
    listener.take(engine(START + 1, utilization=0.4), engine(START + 3, utilization=0.6, running=5))
    sample = listener.sample()
    assert (sample.time_s, sample.kv_utilization, sample.running, sample.waiting) == (START + 3, 0.6, 5, 1)
    assert sample.prompt_tokens_per_s is None
    assert not sample.draining


def test_late_and_repeated_points_change_nothing(listener: Listener) -> None:
    newest = engine(START + 3, total(PROMPT, START, START + 3, 300), utilization=0.6)
    late = engine(START + 1, total(PROMPT, START, START + 1, 100), utilization=0.4)
    listener.take(engine(START, total(PROMPT, START, START, 0)), newest)
    before = listener.observe()
    assert listener.take(late, newest, newest).rejected == 0
    assert listener.observe() == before
    assert listener.store.outcomes["duplicate"] == 12


def test_a_pod_that_said_only_half_is_no_sample(listener: Listener) -> None:
    listener.take(resource([gauge("pagestream.kv.utilization", START, 0.1)], namespace="ns", pool="demo", pod="pod-0"))
    assert listener.observe().samples == {}


def test_pods_are_told_apart_by_namespace_pool_and_name(listener: Listener) -> None:
    listener.take(
        engine(START, utilization=0.1),
        engine(START, utilization=0.2, pod="pod-1"),
        engine(START, utilization=0.3, namespace="other"),
        engine(START, utilization=0.4, pool="second"),
    )
    seen = listener.observe("pod-0", "pod-1", "pod-2").samples
    assert {name: sample.kv_utilization for name, sample in seen.items()} == {"pod-0": 0.1, "pod-1": 0.2}


def test_outside_a_cluster_the_instance_is_the_name(listener: Listener) -> None:
    listener.take(engine(START, utilization=0.1, pod="", namespace="", instance="engine-7"))
    assert listener.sample("engine-7").kv_utilization == 0.1


def test_a_uid_tells_a_pod_from_one_that_had_its_name(listener: Listener) -> None:
    listener.take(engine(START + 5, utilization=0.9, uid="old"), engine(START + 1, utilization=0.2, uid="new"))
    assert listener.sample(PodRef("pod-0", "new")).kv_utilization == 0.2
    assert listener.observe(PodRef("pod-0", "third")).samples == {}
    assert listener.sample("pod-0").kv_utilization == 0.9


def test_a_restarted_process_is_a_new_one(listener: Listener) -> None:
    """Its gauges count from its first export; its counters begin anew and never look like a burst."""
    listener.take(engine(START, total(PROMPT, START - 500, START, 100_000), instance="boot-1"))
    listener.take(engine(START + 2, total(PROMPT, START - 500, START + 2, 100_200), instance="boot-1"))
    listener.now = START + 9
    listener.take(engine(START + 9, total(PROMPT, START + 8, START + 9, 50), utilization=0.1, instance="boot-2"))
    assert (listener.sample().kv_utilization, listener.rate()) == (0.1, 50.0)
    listener.take(engine(START + 4, utilization=0.9, instance="boot-1"))  # the old one's last words come late
    assert listener.sample().kv_utilization == 0.1


def test_draining_and_start_up_are_read(listener: Listener) -> None:
    more = (gauge("pagestream.engine.draining", START, 1), gauge("pagestream.engine.startup.duration", START, 4.5))
    listener.take(engine(START, *more))
    assert (listener.sample().draining, listener.sample().startup_s) == (True, 4.5)


def test_sums_that_can_fall_are_levels(listener: Listener) -> None:
    running = total("pagestream.requests.running", START, START + 1, 7, monotonic=False)
    waiting, utilization = (
        gauge("pagestream.requests.waiting", START, 0),
        gauge("pagestream.kv.utilization", START, 0.5),
    )
    listener.take(resource([running, waiting, utilization], namespace="ns", pool="demo", pod="pod-0"))
    assert listener.sample().running == 7


# -- rates


@pytest.mark.parametrize("temporality", [CUMULATIVE, DELTA])
def test_rates_do_not_depend_on_temporality(listener: Listener, temporality: int) -> None:
    reached = 0
    for step in range(1, 6):
        time_s, added = START + 2 * step, 100 * step
        reached += added
        start, value = (START, reached) if temporality == CUMULATIVE else (time_s - 2, added)
        listener.now = time_s
        listener.take(engine(time_s, total(PROMPT, start, time_s, value, temporality)))
    assert listener.rate() == (300 + 400 + 500) / 6


def test_a_series_that_began_before_anybody_listened_says_nothing_at_first(listener: Listener) -> None:
    listener.take(engine(START, total(PROMPT, START - 1000, START, 1_000_000)))
    assert listener.rate() is None
    listener.take(engine(START + 2, total(PROMPT, START - 1000, START + 2, 1_000_100)))
    assert listener.rate() == 50


@pytest.mark.parametrize("new_start", [START + 3, START - 100])
def test_a_reset_counts_what_was_added_since(listener: Listener, new_start: float) -> None:
    """By a later start, or by a lower value where the exporter keeps the start."""
    begun = START - 100
    listener.take(
        engine(START, total(PROMPT, begun, START, 500)), engine(START + 2, total(PROMPT, begun, START + 2, 600))
    )
    listener.take(engine(START + 4, total(PROMPT, new_start, START + 4, 40)))
    since = min(begun, new_start) if new_start < START else START
    assert listener.rate() == pytest.approx((100 + 40) / (START + 4 - max(since, START)))


def test_series_of_one_counter_are_added(listener: Listener) -> None:
    for time_s, value in ((START, 0), (START + 2, 100)):
        both = [total(PROMPT, START - 1, time_s, value, labels={"kind": kind}) for kind in ("a", "b")]
        listener.take(engine(time_s, *both))
    assert listener.rate() == 100


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=30), st.integers(0, 2**32), st.floats(0, 1))
def test_deltas_count_once_each_in_any_order_and_number(added: list[int], seed: int, repeated: float) -> None:
    """Within the remembered intervals; the window takes all of them here."""
    listener = Listener(settings=StoreSettings(rate_window_s=1000))
    shuffler = random.Random(seed)
    points = [
        engine(START + 2 * step, total(PROMPT, START + 2 * step - 2, START + 2 * step, value, DELTA))
        for step, value in enumerate(added)
    ]
    points += [each for each in points if shuffler.random() < repeated]
    shuffler.shuffle(points)
    listener.now = START + 2 * len(added)
    listener.take(*points)
    rate = listener.rate()
    assert rate is not None
    assert rate * 2 * len(added) == pytest.approx(sum(added))


# -- queues


def waiting(time_s: float, depth: float, age_s: float, partition: str = "0") -> list[Metric]:
    labels = {"gen_ai.request.model": "demo", "partition": partition, "class": "normal"}
    return [
        gauge("pagestream.queue.depth", time_s, depth, labels),
        gauge("pagestream.queue.age", time_s, age_s, labels),
    ]


def test_a_queue_is_added_over_its_partitions_and_is_as_old_as_the_oldest(listener: Listener) -> None:
    listener.take(gateway(START, *waiting(START, 3, 0.5), *waiting(START, 4, 2.5, "1"), tokens=900, running=6))
    seen = listener.observe().queue
    assert seen is not None
    assert (seen.depth, seen.tokens, seen.age_s, seen.running, seen.drain_tokens_per_s) == (7, 900, 2.5, 6, 100)


def test_gateways_are_never_added(listener: Listener) -> None:
    listener.take(gateway(START, *waiting(START, 5, 1), tokens=500, instance="gw-0"))
    listener.take(gateway(START + 1, *waiting(START + 1, 4, 2), tokens=400, instance="gw-1"))
    seen = listener.observe().queue
    assert seen is not None
    assert (seen.time_s, seen.depth, seen.tokens, seen.age_s) == (START + 1, 5, 500, 2)


def test_a_gateway_that_fell_silent_does_not_count(listener: Listener) -> None:
    listener.take(gateway(START, *waiting(START, 90, 60), tokens=9000, instance="dead"))
    listener.now = START + 6
    listener.take(gateway(START + 6, tokens=10, instance="gw-1"))
    seen = listener.observe().queue
    assert seen is not None
    assert (seen.tokens, seen.depth) == (10, 0)


def test_a_partition_that_is_no_longer_told_is_empty(listener: Listener) -> None:
    listener.take(gateway(START, *waiting(START, 3, 9), *waiting(START, 4, 1, "1"), tokens=900))
    listener.take(gateway(START + 2, *waiting(START + 2, 4, 3, "1"), tokens=500))
    seen = listener.observe().queue
    assert seen is not None
    assert (seen.depth, seen.age_s) == (4, 3)
    listener.now = START + 6
    listener.take(gateway(START + 4, tokens=0), gateway(START + 6, tokens=0))
    seen = listener.observe().queue
    assert seen is not None
    assert (seen.depth, seen.age_s) == (0, 0)


def test_a_gateway_that_told_half_is_no_queue(listener: Listener) -> None:
    listener.take(resource(waiting(START, 3, 1), namespace="ns", instance="gw-0"))
    assert listener.observe().queue is None


def test_a_pool_sees_the_queue_of_its_release_from_any_namespace() -> None:
    listener = Listener(release="home.pagestream")
    listener.take(
        gateway(START, tokens=5, namespace="home", release="home.pagestream"),
        gateway(START, tokens=7, namespace="models", release="models.pagestream"),
    )
    assert listener.observe(model="unheard").queue is None
    seen = [listener.observe(namespace=name).queue for name in ("home", "models")]
    assert [queue and queue.tokens for queue in seen] == [5, 5]
    assert listener.store.outcomes["foreign"] == 3


def test_a_gateway_that_names_no_release_counts_for_each() -> None:
    """As those of the version before do during an upgrade."""
    listener = Listener(release="home.pagestream")
    listener.take(gateway(START, tokens=5), gateway(START + 1, tokens=4, instance="gw-1", release="home.pagestream"))
    seen = listener.observe().queue
    assert seen is not None
    assert seen.tokens == 5


def test_latencies_of_another_release_do_not_count() -> None:
    listener = Listener(release="home.pagestream")
    for name, counts in (("home.pagestream", (1, 0, 0, 0)), ("models.pagestream", (0, 0, 0, 9))):
        listener.take(gateway(START, histogram(TTFT, START, START + 1, BOUNDS, counts, DELTA), release=name))
    assert listener.ttft() == (1, 0, 0, 0)


# -- latencies


@pytest.mark.parametrize("temporality", [CUMULATIVE, DELTA])
def test_latencies_of_all_gateways_are_one_window(listener: Listener, temporality: int) -> None:
    for step in (1, 2):
        listener.now = START + 2 * step
        factor = step if temporality == CUMULATIVE else 1
        start = START if temporality == CUMULATIVE else listener.now - 2
        counts = [factor * each for each in (4, 3, 2, 1)]
        for instance in ("gw-0", "gw-1"):
            listener.take(
                gateway(
                    listener.now, histogram(TTFT, start, listener.now, BOUNDS, counts, temporality), instance=instance
                )
            )
    assert listener.ttft() == (16, 12, 8, 4)


def test_latencies_leave_the_window(listener: Listener) -> None:
    listener.take(gateway(START, histogram(TTFT, START - 2, START, BOUNDS, (1, 0, 0, 5), DELTA)))
    listener.now = START + 59
    listener.take(gateway(START + 59, histogram(TTFT, START + 57, START + 59, BOUNDS, (7, 0, 0, 0), DELTA)))
    assert listener.ttft() == (8, 0, 0, 5)
    listener.now = START + 62
    assert listener.ttft() == (7, 0, 0, 0)
    window = listener.observe().ttft
    assert window is not None
    assert window.span_s == 60
    wider = listener.store.observe(namespace="ns", pool="demo", model="demo", pods=[], ttft_window_s=100).ttft
    assert wider is not None
    assert (wider.counts, wider.span_s) == ((8, 0, 0, 5), 62)
    listener.now = START + 1000
    assert sum(listener.ttft()) == 0


def test_latencies_with_other_bounds_are_never_made_earlier(listener: Listener) -> None:
    listener.take(gateway(START, histogram(TTFT, START - 2, START, (1.0,), (5, 2), DELTA)))
    listener.take(gateway(START, histogram(TTFT, START - 2, START, (0.7, 2.0), (3, 4, 1), DELTA), instance="gw-1"))
    window = listener.observe().ttft
    assert window is not None
    assert window.bounds_s == (0.7, 1.0, 2.0)
    assert window.counts == (3, 5, 4, 3)


def test_a_restarted_gateway_s_histogram_counts_anew(listener: Listener) -> None:
    listener.take(gateway(START, histogram(TTFT, START - 900, START, BOUNDS, (100, 0, 0, 50))))
    assert sum(listener.ttft()) == 0
    listener.now = START + 4
    listener.take(gateway(START + 4, histogram(TTFT, START + 2, START + 4, BOUNDS, (3, 0, 0, 1))))
    assert listener.ttft() == (3, 0, 0, 1)


# -- what is wrong


def test_what_nobody_reads_is_dropped_and_counted(listener: Listener) -> None:
    assert listener.take(engine(START, gauge("cpu.temperature", START, 50), gauge("other", START, 1))).rejected == 0
    assert listener.store.outcomes == {"accepted": 3, "unknown": 2}


def test_points_from_the_future_are_refused_and_hide_nothing(listener: Listener) -> None:
    intake = listener.take(engine(START + 3600, utilization=0.0))
    assert (intake.rejected, intake.why()) == (3, "3 from the future")
    listener.take(engine(START, utilization=0.7))
    assert listener.sample().kv_utilization == 0.7


# -- clocks


def fed(listener: Listener, behind_s: float, *, seconds: int = 12, first: int = 0) -> None:
    """Exports every 2 s of an engine and a gateway whose clocks are so far behind."""
    for second in range(first, first + seconds, 2):
        listener.now = START + second
        at = listener.now - behind_s
        listener.take(
            engine(at, total(PROMPT, START - behind_s, at, 100 * second), utilization=0.5),
            gateway(at, histogram(TTFT, START - behind_s, at, BOUNDS, (second, 0, 0, 0)), tokens=7),
        )


@pytest.mark.parametrize("behind_s", [-55, -10, -5.5, -4, 0, 4, 5.5, 10, 55])
def test_clocks_that_are_apart_are_allowed_for(listener: Listener, behind_s: float) -> None:
    fed(listener, behind_s, seconds=40)
    seen = listener.observe()
    assert seen.queue is not None
    for sample in (listener.sample(), seen.queue):
        assert -5 <= listener.now - sample.time_s <= 5, "neither old nor from the future"
    assert listener.rate() == pytest.approx(100)
    assert sum(listener.ttft()) > 0


def test_one_gateway_whose_clock_is_behind_is_heard(listener: Listener) -> None:
    for second in range(0, 20, 2):
        listener.now = START + second
        listener.take(gateway(listener.now, tokens=3), gateway(listener.now - 30, tokens=8, instance="gw-1"))
    seen = listener.observe().queue
    assert seen is not None
    assert seen.tokens == 8


@pytest.mark.parametrize("is_known", [True, False])
def test_a_backlog_counts_as_old(listener: Listener, is_known: bool) -> None:
    """What a collector had kept comes at once, before what is new."""
    if is_known:
        fed(listener, 0)
    listener.now = START + 60
    for second in range(14, 40, 2):
        listener.take(engine(START + second, total(PROMPT, START, START + second, 100 * second), utilization=0.5))
    assert listener.sample().time_s == START + 38
    assert listener.rate() == pytest.approx(100)


def test_a_sender_that_has_fallen_silent_is_silent(listener: Listener) -> None:
    fed(listener, 10)
    listener.now += 30
    assert listener.now - listener.sample().time_s > 25


def test_a_clock_that_is_set_right_is_followed(listener: Listener) -> None:
    fed(listener, 20, seconds=20)
    fed(listener, 0, seconds=10, first=20)
    assert listener.sample().time_s == listener.now
    fed(listener, 20, seconds=90, first=30)
    assert abs(listener.now - listener.sample().time_s) <= 5


def test_the_own_clock_goes_on_when_the_systems_is_set() -> None:
    times = {"wall": 1000.0, "steady": 5.0}
    clock = SteadyClock(wall=lambda: times["wall"], steady=lambda: times["steady"])
    times |= {"wall": 992.0, "steady": 7.0}
    assert clock() == 1002.0
    times |= {"wall": 9000.0, "steady": 8.0}
    assert clock() == 9000.0, "it was wrong by more than can be allowed for"


def test_absurd_gauges_reach_the_law_which_names_them(listener: Listener) -> None:
    listener.take(
        engine(START, utilization=math.nan), gateway(START, tokens=math.nan), gateway(START, tokens=5, instance="b")
    )
    assert math.isnan(listener.sample().kv_utilization)
    seen = listener.observe().queue
    assert seen is not None
    assert math.isnan(seen.tokens)


@pytest.mark.parametrize(
    "metric",
    [
        gauge(PROMPT, START, 5),
        total(PROMPT, START, START + 1, 5, UNSPECIFIED),
        total(PROMPT, START, START + 1, 5, monotonic=False),
        total(PROMPT, START, START + 1, -5),
        total("pagestream.kv.utilization", START, START + 1, 1, DELTA),
        gauge(TTFT, START, 1.0),
        histogram(TTFT, START, START + 1, BOUNDS, (1, 2, 3)),
        histogram(TTFT, START, START + 1, (1.0, 0.5, 2.0), (1, 2, 3, 4)),
        histogram(TTFT, START, START + 1, (math.nan, 1.0), (1, 2, 3)),
        histogram(TTFT, START, START + 1, BOUNDS, (1, 2, 3, 4), UNSPECIFIED),
        histogram("pagestream.requests.running", START, START + 1, BOUNDS, (1, 2, 3, 4)),
        Metric(
            name=TTFT, exponential_histogram=ExponentialHistogram(data_points=[ExponentialHistogramDataPoint(count=1)])
        ),
    ],
    ids=lambda metric: f"{metric.name}-{metric.WhichOneof('data')}",
)
def test_points_that_are_not_what_the_metric_is_are_refused(listener: Listener, metric: Metric) -> None:
    intake = listener.take(resource([metric], namespace="ns", pool="demo", pod="pod-0", instance="pod-0"))
    assert intake.rejected == 1
    assert listener.store.outcomes == {"absurd": 1}


def test_nobody_s_metrics_are_refused(listener: Listener) -> None:
    intake = listener.take(resource([gauge("pagestream.kv.utilization", START, 0.5)], pool="demo"))
    assert intake.why() == "1 from a resource without k8s.pod.name or service.instance.id"
    endless = resource([gauge("pagestream.kv.utilization", START, 0.5)], pool="demo", pod="x" * 254)
    assert listener.take(endless).rejected == 1


def test_marks_that_a_series_ended_are_no_values(listener: Listener) -> None:
    mark = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
    utilization, latency = (
        gauge("pagestream.kv.utilization", START + 1, 0),
        histogram(TTFT, START, START + 1, BOUNDS, ()),
    )
    utilization.gauge.data_points[0].flags = latency.histogram.data_points[0].flags = mark
    listener.take(engine(START, utilization=0.7))
    assert listener.take(resource([utilization, latency], namespace="ns", pool="demo", pod="pod-0")).rejected == 0
    assert listener.sample().kv_utilization == 0.7


# -- bounds


def test_pods_are_bounded_and_the_silent_make_room() -> None:
    listener = Listener(settings=StoreSettings(max_pods=2))
    assert listener.take(*(engine(START, pod=f"pod-{index}") for index in range(2))).rejected == 0
    assert listener.take(engine(START, pod="pod-2")).why() == "3 over the bound of what is kept"
    listener.now = START + 200
    assert listener.take(engine(START + 200, pod="pod-1")).rejected == 0
    listener.now = START + 350
    assert listener.take(engine(START + 350, pod="pod-2")).rejected == 0
    assert set(listener.observe("pod-0", "pod-1", "pod-2").samples) == {"pod-1", "pod-2"}


def test_an_old_entry_counts_however_many_partitions_there_are() -> None:
    """A gateway of the version before has a series for each partition and class: 1,280 here, of 128 that are kept."""
    listener = Listener()
    partitions = [waiting(START, 1, 60 if index == 1000 else 0, str(index)) for index in range(1280)]
    listener.take(gateway(START, *(metric for pair in partitions for metric in pair), tokens=500))
    seen = listener.observe().queue
    assert seen is not None
    assert (seen.depth, seen.age_s) == (1280, 60)
    listener.take(gateway(START + 2, *waiting(START + 2, 1, 2), tokens=500))
    seen = listener.observe().queue
    assert seen is not None
    assert (seen.depth, seen.age_s) == (1, 2)


def test_models_gateways_and_series_are_bounded() -> None:
    listener = Listener(
        settings=StoreSettings(max_models=1, max_gateways=1, max_attribute_sets=3, max_latency_series=2)
    )
    assert listener.take(gateway(START, tokens=1)).rejected == 0
    assert listener.take(gateway(START, tokens=1, instance="gw-1")).rejected == 3
    assert listener.take(gateway(START, tokens=1, namespace="other")).rejected == 3
    series = [
        histogram(
            TTFT, START, START + 1, BOUNDS, (1, 0, 0, 0), labels={"gen_ai.request.model": "demo", "n": str(index)}
        )
        for index in range(5)
    ]
    assert listener.take(resource(series, namespace="ns", instance="gw-0")).rejected == 3
    counters = [total(PROMPT, START, START + 1, 1, labels={"n": str(index)}) for index in range(5)]
    assert listener.take(resource(counters, namespace="ns", pool="demo", pod="pod-0")).rejected == 2


def test_instances_of_one_pod_are_bounded_to_the_last() -> None:
    listener = Listener()
    for index in range(50):
        listener.now = START + index
        listener.take(engine(START + index, utilization=index / 100, instance=f"boot-{index}"))
    assert listener.sample().kv_utilization == 0.49


def test_silent_models_are_forgotten() -> None:
    listener = Listener()
    listener.take(gateway(START, histogram(TTFT, START - 2, START, BOUNDS, (1, 0, 0, 0), DELTA)))
    listener.now = START + 299
    listener.store.sweep()
    assert listener.observe().queue is not None
    listener.now = START + 320
    listener.store.sweep()
    assert listener.observe() == PoolMetrics({}, None, None)


def takeable(time_s: float, name: str, tokens: float, age_s: float, claimed: float = 0.0) -> list[Metric]:
    labels = {"gen_ai.request.model": "demo", "class": name}
    return [
        gauge("pagestream.queue.takeable.tokens", time_s, tokens, labels),
        gauge("pagestream.queue.takeable.age", time_s, age_s, labels),
        gauge("pagestream.queue.takeable.longest", time_s, tokens / 2, labels),
        gauge("pagestream.queue.claimed.rate", time_s, claimed, labels),
    ]


def test_tokens_and_age_are_those_of_what_engines_may_take(listener: Listener) -> None:
    """One old request that no living engine may take, one suspect, and two classes."""
    parts = [
        *takeable(START, "0", 200, 0.5, 70),
        *takeable(START, "2", 100, 40, 30),
        *takeable(START, "suspect", 0, 90),
    ]
    listener.take(gateway(START, *waiting(START, 4, 600), *parts, tokens=90_000))
    seen = listener.observe().queue
    assert seen is not None
    assert (seen.depth, seen.tokens, seen.longest_tokens) == (4, 300, 100)
    assert seen.classes == (ClassSample("0", 200, 0.5, 70), ClassSample("2", 100, 40, 30))
    assert seen.age_s == 40


def test_gateways_of_an_earlier_version_report_all_that_waits(listener: Listener) -> None:
    listener.take(gateway(START, *waiting(START, 3, 9), tokens=900))
    seen = listener.observe().queue
    assert seen is not None
    assert (seen.tokens, seen.age_s, seen.longest_tokens, seen.classes) == (900, 9, None, ())


# -- A pool's models as one load


NOW = 1_700_000_000.0
BUSY = QueueSample(
    NOW - 1,
    3,
    900,
    4.0,
    2,
    300.0,
    500,
    200.0,
    None,
    (ClassSample("batch", 900, 4.0, 300.0), ClassSample("chat", 0, 0, 0)),
)
IDLE = QueueSample(NOW, 1, 100, 9.0, 0, None, 100, None, 40, (ClassSample("batch", 100, 9.0, 0.0),))


def test_queues_add_up_and_the_oldest_and_largest_request_is_that_of_any() -> None:
    assert total_queue([BUSY, None, IDLE]) == QueueSample(
        NOW,
        4,
        1000,
        9.0,
        2,
        300.0,
        500,
        200.0,
        40,
        (ClassSample("batch", 1000, 9.0, 300.0), ClassSample("chat", 0, 0, 0)),
    )
    assert total_queue([None, BUSY]) is BUSY
    assert total_queue([None, None]) is None


def test_a_model_that_gateways_no_longer_report_is_left_out() -> None:
    gone = QueueSample(NOW - 60, 7, 700, 70.0, 7)
    total = total_queue([gone, IDLE])
    assert total is not None
    assert (total.time_s, total.tokens, total.age_s) == (NOW, 100, 9.0)


def test_the_share_of_all_queues_goes_by_their_work() -> None:
    assert share_of_all([BUSY, IDLE], [0.5, 1.0]) == (1200 * 0.5 + 100 * 1.0) / 1300
    assert share_of_all([None, None], [0.5, 1.0]) == 0.75
    assert share_of_all([BUSY], [0.25]) == 0.25


def test_latencies_add_up_where_bounds_differ() -> None:
    one, other = LatencyWindow((0.5, 1.0), (1, 2, 3), 60.0), LatencyWindow((1.0, 2.0), (10, 20, 30), 30.0)
    assert total_latencies([one, None, other]) == LatencyWindow((0.5, 1.0, 2.0), (1, 12, 20, 33), 60.0)
    assert total_latencies([LatencyWindow((), (0,), 1.0), one]) == LatencyWindow((0.5, 1.0), (1, 2, 3), 60.0)
