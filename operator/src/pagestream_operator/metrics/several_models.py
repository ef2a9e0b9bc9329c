"""The queues and latencies of a pool's models as one: its engines serve any of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from statistics import fmean

from pagestream_scaling import ClassSample, LatencyWindow, QueueSample

from pagestream_operator.metrics.queue_reports import highest_known

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
        classes=_classes(current),
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


def _classes(queues: Iterable[QueueSample]) -> tuple[ClassSample, ...]:
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
