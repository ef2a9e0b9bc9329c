"""Queued work by priority class: how much of it counts. docs/autoscaling.md, "Classes"."""

from __future__ import annotations

from pagestream_scaling.observation import QueueSample
from pagestream_scaling.policy import BacklogPolicy


def weighted_part(queue: QueueSample, policy: BacklogPolicy) -> float:
    """Return the part of the queued tokens that counts, 0 to 1. What belongs to no known class counts in full."""
    return _part(queue.tokens, [(_weight(each.name, policy), each.tokens) for each in queue.classes])


def weighted_drain(queue: QueueSample, policy: BacklogPolicy) -> float | None:
    """Return the part of the claimed tokens that counts, 0 to 1; None while nothing is claimed."""
    if not queue.drain_tokens_per_s:
        return None
    rates = [(_weight(each.name, policy), each.drain_tokens_per_s) for each in queue.classes]
    return _part(queue.drain_tokens_per_s, rates)


def weighted_age(queue: QueueSample, policy: BacklogPolicy) -> float:
    """Return the longest wait of a class' oldest request, times the class' weight. Without classes the age itself."""
    if not queue.classes:
        return queue.age_s
    return max(_weight(each.name, policy) * each.age_s for each in queue.classes)


def _weight(name: str, policy: BacklogPolicy) -> float:
    if not name.isdecimal():
        return 1.0  # begun requests, whatever their class: their clients have a part of the answer
    return policy.class_weights[min(int(name), len(policy.class_weights) - 1)]


def _part(total: float, amounts: list[tuple[float, float]]) -> float:
    known = sum(amount for _, amount in amounts)
    whole = max(total, known)
    if whole <= 0:
        return 1.0
    return (whole - known + sum(weight * amount for weight, amount in amounts)) / whole
