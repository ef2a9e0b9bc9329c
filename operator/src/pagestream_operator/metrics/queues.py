"""A model's queue, from the reports of its gateways, and the queues and latencies of a pool's models as one.

Each gateway reports the same, so the highest values count.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean

from pagestream_scaling import ClassSample, LatencyWindow, QueueSample

from pagestream_operator.metrics.points import CLASS_ATTRIBUTE, Queue
from pagestream_operator.metrics.series import Gauge

_EXPORT_S = 2.5
"""An export interval, with a margin."""
_SUSPECTS = "suspect"
"""The class of requests that wait for an engine that is idle, not for more engines."""
Gauges = Mapping[str, Gauge]


def queue_sample(gateways: Iterable[Gauges], apart_s: float) -> QueueSample | None:
    """Combine the newest reports, and those that are at most `apart_s` older; None without any."""
    reports = [report for gauges in gateways if (report := _report_of(gauges)) is not None]
    if not reports:
        return None
    newest = max(report.time_s for report in reports)
    current = [report for report in reports if newest - report.time_s <= apart_s]
    return QueueSample(
        time_s=newest,
        depth=_highest(report.depth for report in current),
        tokens=_highest(report.tokens for report in current),
        age_s=_highest(report.age_s for report in current),
        running=_highest(report.running for report in current),
        drain_tokens_per_s=highest_known(report.drain_tokens_per_s for report in current),
        longest_tokens=highest_known(report.longest_tokens for report in current),
        drain_longest_per_s=highest_known(report.drain_longest_per_s for report in current),
        output_tokens=highest_known(report.output_tokens for report in current),
        classes=_classes(current),
    )


def _classes(reports: Iterable[QueueSample]) -> tuple[ClassSample, ...]:
    by_name: dict[str, list[ClassSample]] = {}
    for report in reports:
        for each in report.classes:
            by_name.setdefault(each.name, []).append(each)
    return tuple(
        ClassSample(
            name,
            _highest(each.tokens for each in known),
            _highest(each.age_s for each in known),
            _highest(each.drain_tokens_per_s for each in known),
        )
        for name, known in sorted(by_name.items())
    )


def _highest(values: Iterable[float]) -> float:
    """The highest value; NaN if any is NaN, so that an absurd report isn't hidden by comparisons with it."""
    found = list(values)
    return math.nan if any(map(math.isnan, found)) else max(found)


def highest_known(values: Iterable[float | None]) -> float | None:
    """The highest value of those that are known; None for none, NaN if any is NaN."""
    known = [value for value in values if value is not None]
    return _highest(known) if known else None


def _report_of(gauges: Gauges) -> QueueSample | None:
    """One gateway's report; None until it has exported tokens and running.

    Classes in which nothing waits may have no depth and age: what its newest export lacks is 0. What no engine may take
    counts for the depth alone; a gateway of an earlier version doesn't say what that is.
    """
    read = {name: value for name, gauge in gauges.items() if (value := gauge.read()) is not None}
    tokens, running = read.get(Queue.TOKENS), read.get(Queue.RUNNING)
    if tokens is None or running is None:
        return None
    oldest_s = tokens[0] - _EXPORT_S

    def current(name: str) -> float | None:
        value = read.get(name)
        return value[1] if value is not None and value[0] >= oldest_s else None

    takeable = current(Queue.TAKEABLE_TOKENS)
    classes = _classes_of(gauges, oldest_s)
    age_s = current(Queue.AGE) if takeable is None else max((each.age_s for each in classes), default=0.0)
    drain = read.get(Queue.DRAIN_RATE)
    return QueueSample(
        time_s=min(tokens[0], running[0]),
        depth=current(Queue.DEPTH) or 0.0,
        tokens=tokens[1] if takeable is None else takeable,
        age_s=age_s or 0.0,
        running=running[1],
        drain_tokens_per_s=drain[1] if drain is not None else None,
        longest_tokens=current(Queue.TAKEABLE_LONGEST),
        drain_longest_per_s=current(Queue.CLAIMED_LONGEST),
        output_tokens=current(Queue.TAKEABLE_OUTPUT),
        classes=classes,
    )


def _classes_of(gauges: Gauges, oldest_s: float) -> tuple[ClassSample, ...]:
    tokens, ages, rates = (
        _by_class(gauges.get(name), oldest_s)
        for name in (Queue.TAKEABLE_TOKENS, Queue.TAKEABLE_AGE, Queue.CLAIMED_RATE)
    )
    return tuple(
        ClassSample(name, tokens[name], ages.get(name, 0.0), rates.get(name, 0.0))
        for name in tokens
        if name != _SUSPECTS
    )


def _by_class(gauge: Gauge | None, oldest_s: float) -> dict[str, float]:
    if gauge is None:
        return {}
    time_s, by_set = gauge.read_sets()
    return {dict(key).get(CLASS_ATTRIBUTE, ""): value for key, value in by_set.items()} if time_s >= oldest_s else {}


_APART_S = 5.0
"""Reports that are older than the newest one by more don't count: gateways report all models at once, so that such a
model is no longer published."""


def total_queue(queues: Sequence[QueueSample | None]) -> QueueSample | None:
    """Add up the queues of models; None where none has a report. Ages and largest requests are the highest of any."""
    known = [each for each in queues if each is not None]
    if len(known) <= 1:
        return known[0] if known else None
    newest = max(each.time_s for each in known)
    current = [each for each in known if newest - each.time_s <= _APART_S]
    return QueueSample(
        time_s=newest,
        depth=sum(each.depth for each in current),
        tokens=sum(each.tokens for each in current),
        age_s=max(each.age_s for each in current),
        running=sum(each.running for each in current),
        drain_tokens_per_s=_sum_of_known(each.drain_tokens_per_s for each in current),
        longest_tokens=highest_known(each.longest_tokens for each in current),
        drain_longest_per_s=highest_known(each.drain_longest_per_s for each in current),
        output_tokens=_sum_of_known(each.output_tokens for each in current),
        classes=_several_models_classes(current),
    )


def share_of_all(queues: Sequence[QueueSample | None], shares: Sequence[float]) -> float:
    """Return the part of the total that falls to a pool with these shares of each queue: their mean, weighted by the
    prompt tokens that wait or were claimed in the last second."""
    if len(shares) == 1:
        return shares[0]
    work = [0.0 if each is None else each.tokens + (each.drain_tokens_per_s or 0.0) for each in queues]
    if not 0 < sum(work) < math.inf:
        return fmean(shares)
    return sum(part * share for part, share in zip(work, shares, strict=True)) / sum(work)


def total_latencies(windows: Sequence[LatencyWindow | None]) -> LatencyWindow | None:
    """Add up histograms; None where there is none. Where bounds differ a request counts as late as it may have been."""
    known = [each for each in windows if each is not None]
    if len(known) <= 1:
        return known[0] if known else None
    bounds = tuple(sorted({bound for each in known for bound in each.bounds_s}))
    counts = [0.0] * (len(bounds) + 1)
    for each in known:
        for high, count in zip_longest(each.bounds_s, each.counts, fillvalue=math.inf):
            counts[bisect_left(bounds, high)] += count
    return LatencyWindow(bounds, tuple(counts), max(each.span_s for each in known))


def _several_models_classes(queues: Iterable[QueueSample]) -> tuple[ClassSample, ...]:
    by_name: dict[str, ClassSample] = {}
    for each in (sample for queue in queues for sample in queue.classes):
        have = by_name.get(each.name, ClassSample(each.name, 0.0, 0.0, 0.0))
        by_name[each.name] = ClassSample(
            each.name,
            have.tokens + each.tokens,
            max(have.age_s, each.age_s),
            have.drain_tokens_per_s + each.drain_tokens_per_s,
        )
    return tuple(by_name[name] for name in sorted(by_name))


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
